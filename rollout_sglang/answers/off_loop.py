"""Answers are read beside the event loop, while they come.

One thread reads for all engines of a process. Parsing needs Python's lock, so more threads would not be faster, and the
loop would have to wait for the lock behind each of them. Who waits for the thread takes no more bytes from its
connection meanwhile: however many answers come at once, each has few of its bytes here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rollout_sglang.answers.samples import SampleReader

PIECE_BYTES = 1 << 16
"""What is read at once. Where an answer has no more, it is read on the loop, which takes about a millisecond."""
_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="answers")

T = TypeVar("T")


async def read_answer(parts: AsyncIterator[bytes], reader: SampleReader[T]) -> list[T]:
    """What `reader` makes of the samples of an answer that comes in `parts`. Raises what the reader raises."""
    loop, held, is_small = asyncio.get_running_loop(), bytearray(), True
    async for part in parts:
        held += part
        if len(held) > PIECE_BYTES:
            is_small = False
            await loop.run_in_executor(_THREAD, reader.add, bytes(held))
            held.clear()
    if is_small:
        return _finish(reader, bytes(held))
    return await loop.run_in_executor(_THREAD, _finish, reader, bytes(held))


def _finish(reader: SampleReader[T], rest: bytes) -> list[T]:
    reader.add(rest)
    return reader.end()
