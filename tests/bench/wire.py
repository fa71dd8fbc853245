"""A process group's broadcast beside a plain copy of as many bytes: what the wire of a publish could cost at best.

Two processes, gloo, buckets; the copy is `tests.bench.loopback`. Each is timed with nothing beside it, and while one
thread of either process hashes, as those of learner and engine do during a publish. All take turns. Printed are medians
in quiet copies, and the smallest and largest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from tests.bench.loopback import Loopback

ROUNDS = 15
"""The first is left out."""
DEADLINE = timedelta(seconds=60)
NUM_BYTES = 101_000_000
"""About as many as the policy of tests.bench.publish has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buckets", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="one line instead of a table")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as scratch,
        ProcessPoolExecutor(2, get_context("spawn")) as ranks,
    ):
        sides = [ranks.submit(take_turns, rank, f"{scratch}/store", arguments.buckets) for rank in range(2)]
        seconds, _ = (side.result() for side in sides)
    copy_s = statistics.median(seconds["copy"])
    copies = {what: [each(taken) / copy_s for each in (statistics.median, min, max)] for what, taken in seconds.items()}
    if arguments.json:
        print(json.dumps(dict(copy_s=copy_s, buckets=arguments.buckets, copies=copies)))
        return
    for what, (median, least, most) in copies.items():
        print(f"{what:20} {median:.2f} ({least:.2f} to {most:.2f})")


def take_turns(rank: int, store: str, buckets: int) -> dict[str, list[float]]:
    """Rank 0 sends, rank 1 receives. What each way took, in seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, 2), rank=rank, world_size=2, timeout=DEADLINE)
    halves = [torch.zeros(NUM_BYTES // buckets, dtype=torch.uint8) for _ in range(2)]
    data, seconds = bytearray(NUM_BYTES), []
    with Loopback() if rank == 0 else nullcontext() as loopback:
        for _ in range(ROUNDS):
            found = {}
            for beside, work in (("", nullcontext), (", hashing", hashing)):
                with work():
                    found["broadcast" + beside] = broadcast(halves, buckets)
                    if loopback is not None:
                        found["copy" + beside] = loopback.copy(data)
                    dist.barrier()
            seconds.append(found)
    dist.destroy_process_group()
    return {what: [one[what] for one in seconds[1:]] for what in sorted(seconds[0])}


def broadcast(halves: Sequence[torch.Tensor], buckets: int) -> float:
    """Seconds until both processes have all of it."""
    dist.barrier()
    began = time.monotonic()
    for number in range(buckets):
        dist.broadcast(halves[number % 2], 0)
    dist.barrier()
    return time.monotonic() - began


@contextmanager
def hashing() -> Iterator[None]:
    """One thread of this process hashes meanwhile."""
    ended, data = threading.Event(), bytes(16 << 20)

    def hash_on() -> None:
        while not ended.is_set():
            hashlib.sha256(data).digest()

    thread = threading.Thread(target=hash_on)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    main()
