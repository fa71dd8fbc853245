"""Answers are read beside the event loop, while they come.

Who waits to be read takes no more bytes from its connection meanwhile: however many answers come at once, each has few
of its bytes here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from pipeline.background import beside_loop
from rollout_sglang.answers.samples import SampleReader

PIECE_BYTES = 1 << 16
"""What is read at once. Where an answer has no more, it is read on the loop, which takes about a millisecond."""

T = TypeVar("T")


async def read_answer(parts: AsyncIterator[bytes], reader: SampleReader[T]) -> list[T]:
    """What `reader` makes of the samples of an answer that comes in `parts`. Raises what the reader raises."""
    held, is_small = bytearray(), True
    async for part in parts:
        held += part
        if len(held) > PIECE_BYTES:
            is_small = False
            await beside_loop(reader.add, bytes(held))
            held.clear()
    if is_small:
        return _finish(reader, bytes(held))
    return await beside_loop(_finish, reader, bytes(held))


def _finish(reader: SampleReader[T], rest: bytes) -> list[T]:
    reader.add(rest)
    return reader.end()
