"""Work that needs Python's lock for milliseconds, done beside the event loop of a process.

One thread does all of it. More would not be faster, for one at a time has the lock, and the loop would have to wait
for the lock behind each of them. What computes without the lock for long, such as the commit of a batch, has a thread
of its own (asyncio.to_thread).

Whatever gives the lock away on the loop itself, each read of a socket and what NumPy does to thousands of numbers,
waits for this thread to give it back. So the thread is asked for it ten times as often as Python would.

Nor is the lock free while Python looks for cycles of garbage, and then it looks at every object: the 75,000 of imported
modules take it 60 to 120 ms, which `spare_collections` saves.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple, Unpack

SWITCH_S = 0.0005
"""After so long the thread is asked to give the lock away; without it, after 5 ms."""
_THREAD = ThreadPoolExecutor(
    max_workers=1, thread_name_prefix="beside-loop", initializer=sys.setswitchinterval, initargs=(SWITCH_S,)
)

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


async def beside_loop(work: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
    """What `work` returns, or raises."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work, *arguments)


def spare_collections() -> None:
    """Leave the objects that there are out of all later collections of garbage. For a process that has imported and
    built what it needs: what of it becomes a cycle of garbage later is never freed."""
    gc.collect()
    gc.freeze()
