"""What the product asks of Python and the operating system, answered by the simulation while one runs.

Time, sleep, files, random names and thread pools: only for the thread of the process that runs. All other threads (the
test, Zarr's own) get the real thing.
"""

from __future__ import annotations

import builtins
import concurrent.futures
import io
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.chaos.simulation.disk import Disk
    from tests.chaos.simulation.world import World

REAL = SimpleNamespace(
    open=io.open,
    os_open=os.open,
    **{
        name: getattr(os, name)
        for name in (
            *("mkdir", "rmdir", "unlink", "link", "rename", "replace", "write", "fsync", "listdir", "stat", "utime"),
            "readlink",
        )
    },
    **{name: getattr(time, name) for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "sleep")},
    uuid4=uuid.uuid4,
    submit=concurrent.futures.ThreadPoolExecutor.submit,
)
"""Taken before anything is replaced."""


@contextmanager
def switched(world: World, disk: Disk) -> Iterator[None]:
    """While the block runs, processes of `world` see its clock and its disk."""
    replaced = _replacements(world, disk)
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, ours in replaced:
        setattr(owner, name, ours)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _replacements(world: World, disk: Disk) -> list[tuple[Any, str, Any]]:
    """(owner, attribute, what stands there while a simulation runs)."""
    mine = world.is_mine

    def on_disk(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
        real = getattr(REAL, name)

        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if mine() and disk.holds(path):
                return ours(path, *arguments, **options)
            return real(path, *arguments, **options)

        return call

    def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mine() and disk.holds(path):
            return disk.open(path, mode, lambda: REAL.open(path, mode, *arguments, **options))
        return REAL.open(path, mode, *arguments, **options)

    def os_opened(path: Any, flags: int, mode: int = 0o777, **options: Any) -> Any:
        if mine() and disk.holds(path):
            return disk.open(path, "a" if flags & os.O_CREAT else "r", lambda: REAL.os_open(path, flags, mode))
        return REAL.os_open(path, flags, mode, **options)

    def submit(pool: Any, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if not mine():
            return REAL.submit(pool, work, *arguments, **options)
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            done.set_result(work(*arguments, **options))
        except Exception as error:  # noqa: BLE001 (the caller's, as from a pool)
            done.set_exception(error)
        return done

    def either(name: str, ours: Callable[[], Any]) -> Callable[[], Any]:
        real = getattr(REAL, name)
        return lambda: ours() if mine() else real()

    def on_descriptor(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
        real = getattr(REAL, name)
        return lambda descriptor, *data: ours(descriptor, *data) if mine() else real(descriptor, *data)

    bits = world.names_random.getrandbits
    replaced: list[tuple[Any, str, Any]] = [
        (time, "time", either("time", lambda: world.now + world.clock_offset)),
        (time, "time_ns", either("time_ns", lambda: int((world.now + world.clock_offset) * 1e9))),
        (time, "monotonic", either("monotonic", lambda: world.now)),
        (time, "monotonic_ns", either("monotonic_ns", lambda: int(world.now * 1e9))),
        (time, "perf_counter", either("perf_counter", lambda: world.now)),
        (time, "sleep", lambda seconds: _sleep(world, seconds) if mine() else REAL.sleep(seconds)),
        (uuid, "uuid4", either("uuid4", lambda: uuid.UUID(int=bits(128), version=4))),
        (concurrent.futures.ThreadPoolExecutor, "submit", submit),
        (io, "open", opened),
        (builtins, "open", opened),
        (os, "open", os_opened),
        (os, "write", on_descriptor("write", disk.write)),
        (os, "fsync", on_descriptor("fsync", disk.fsync)),
        (os, "replace", on_disk("replace", disk.rename)),
        (os, "remove", on_disk("unlink", disk.unlink)),
        *((os, name, on_disk(name, getattr(disk, name))) for name in ("mkdir", "rmdir", "unlink", "link", "rename")),
        (os, "listdir", on_disk("listdir", disk.listdir)),
        (shutil, "_use_fd_functions", False),
    ]
    if world.plan.visible_s:
        replaced.append((os, "stat", on_disk("stat", disk.stat)))
    return replaced


def _sleep(world: World, seconds: float) -> None:
    world.point("sleep")
    world.sleep(seconds)
