"""The shards of a rank are written by its own threads; Megatron would fork a process for each.

A fork holds all that the rank holds: its sockets, its shared memory. Left alone by a rank that was killed, it waits for
ever on a queue and keeps them; and a rank whose fork was killed, for want of memory for example, waits for ever for it.
Threads end with the rank, write what the forks would have written, and copy no page.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

_Writer = filesystem_async.FileSystemWriterAsync


class _Outcome:
    """Both queues that Megatron's writer is given, for one writer: what it wrote, or what it met."""

    value: tuple[int, Any]

    def put(self, value: tuple[int, Any]) -> None:
        self.value = value

    def get(self) -> None:
        """A writer says that it is done by taking one entry."""

    def task_done(self) -> None:
        """See `get`."""


def write_in_threads() -> None:
    """From now on, a save of this process forks nothing. One that blocks hands its results over inside this process:
    left alone, Megatron starts a manager process for them, too."""
    filesystem_async._results_queue = queue.SimpleQueue()
    _Writer.write_preloaded_data_multiproc = staticmethod(_write_all)


def _write_all(
    transforms: Sequence[Any], use_msc: bool, _rank: int, buckets: Sequence[Any], results: queue.SimpleQueue[Any]
) -> None:
    """In place of Megatron's function of these arguments. `results` gets what each bucket's writer returns, by its
    number. Raises the first error that one met, which Megatron would lose on its way to rank 0."""
    options = {"use_msc": True} if use_msc else {}

    def write(number: int) -> tuple[int, Any]:
        outcome = _Outcome()
        _Writer.write_preloaded_data(transforms, number, buckets[number], outcome, outcome, True, **options)
        return outcome.value

    with ThreadPoolExecutor(max(1, len(buckets)), thread_name_prefix="shard-writer") as threads:
        written = dict(threads.map(write, range(len(buckets))))
    for found in written.values():
        if isinstance(found, Exception):
            raise found
    results.put(written)
