"""A function in several processes that form a gloo world, forked from one that has torch and Megatron loaded.

    pytest ── Ranks(2, body, …) ──▶ fork server (torch, Megatron: imported once a worker of pytest)
       ▲                                 ├──fork──▶ rank 0: body(…) ── result or traceback ─┐
       │                                 └──fork──▶ rank 1: body(…) ── result or traceback ─┤
       └────────────────────────────────────────────────────────────────────────────────────┘

Importing Megatron takes five seconds of a core, a fork some milliseconds. torchrun is tried by the tests that run the
product's own commands.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

ROOT = Path(__file__).parents[2]
PRELOADED = ("megatron_bridge.learner", "launch.verify.layout_ranks", "rollout_sglang.weights.expected_checksums")
DEADLINE_S = 200.0
COLLECTIVE_DEADLINE_S = 180.0
_LEFT_S = 3.0
"""What the other ranks get to fail by themselves, once one has failed."""


class RankFailedError(AssertionError):
    """A rank raised, died or took too long; the message holds tracebacks and what the ranks printed."""


class Ranks:
    """`body(*arguments)` in `count` processes at once; a context manager that leaves no process behind.

    Body and arguments are pickled: a function of a module, and plain data. In a rank, `torch.distributed` is a gloo
    world, RANK, LOCAL_RANK and WORLD_SIZE are set, and torch has one thread. A body may end its process with status 0.
    """

    def __init__(self, count: int, body: Callable[..., Any], *arguments: Any) -> None:
        context = forkserver_context()
        self._scratch = tempfile.TemporaryDirectory(prefix="evenkeel-ranks-")
        self._folder = Path(self._scratch.name)
        self._results: dict[int, Any] = {}
        self._failures: dict[int, str] = {}
        self._connections: dict[Connection, int] = {}
        self._processes: list[BaseProcess] = []
        try:
            for rank in range(count):
                ours, theirs = context.Pipe(duplex=False)
                self._connections[ours] = rank
                process = context.Process(target=_run_rank, args=(rank, count, self._folder, theirs, body, arguments))
                with theirs:
                    process.start()
                self._processes.append(process)
        except BaseException:  # arguments that cannot be pickled
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what is still at work, with all its children."""
        for process in self._processes:
            if process.pid is not None and process.exitcode is None:
                _kill_tree(process.pid)
            process.join()
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._scratch.cleanup()

    def check(self) -> None:
        """Raises RankFailedError when a rank has failed by now; for a test that acts while the ranks work."""
        self._collect(0.0)
        if self._failures:
            self.results(0.0)

    def status(self) -> int | None:
        """None while all ranks are at work or have ended well, 0 once all have, 1 once one has failed."""
        self._collect(0.0)
        if self._failures:
            return 1
        return None if self._connections else 0

    def results(self, deadline_s: float = DEADLINE_S) -> list[Any]:
        """What each rank returned, in the order of ranks.

        Raises RankFailedError, with the stacks of ranks that are still at work after `deadline_s`.
        """
        ends = time.monotonic() + deadline_s
        while self._connections and not self._failures and time.monotonic() < ends:
            self._collect(ends - time.monotonic())
        if self._failures:
            self._collect_for(_LEFT_S)
        hanging = sorted(self._connections.values())
        if hanging:
            self._dump_stacks(hanging)
        if hanging or self._failures:
            raise RankFailedError(self._report(hanging, deadline_s))
        return [self._results[rank] for rank in range(len(self._processes))]

    def _collect_for(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while self._connections and time.monotonic() < ends:
            self._collect(ends - time.monotonic())

    def _collect(self, timeout_s: float) -> None:
        """Take what ranks have sent, or that they are gone without a word."""
        for connection in wait(list(self._connections), max(0.0, timeout_s)):
            assert isinstance(connection, Connection)
            rank = self._connections.pop(connection)
            try:
                succeeded, value = connection.recv()
            except EOFError:
                self._processes[rank].join(_LEFT_S)
                status = self._processes[rank].exitcode
                succeeded, value = (True, None) if status == 0 else (False, f"died with exit code {status}")
            connection.close()
            (self._results if succeeded else self._failures)[rank] = value

    def _dump_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            pid = self._processes[rank].pid
            if pid is not None and self._processes[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)

    def _report(self, hanging: list[int], deadline_s: float) -> str:
        said = [f"rank {rank}: {self._failures[rank]}" for rank in sorted(self._failures)]
        said += [f"rank {rank} was still at work after {deadline_s:g} s" for rank in hanging]
        for rank in range(len(self._processes)):
            log = self._folder / f"rank-{rank}.log"
            if log.exists() and (text := log.read_text(errors="replace").strip()):
                said.append(f"--- what rank {rank} printed\n{text[-4000:]}")
        return "\n".join(said)


def run_ranks(count: int, body: Callable[..., Any], *arguments: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
    """`body(*arguments)` in `count` ranks, to their end; returns what each rank returned."""
    with Ranks(count, body, *arguments) as ranks:
        return ranks.results(deadline_s)


def forkserver_context() -> multiprocessing.context.ForkServerContext:
    """The fork server of this process, started at the first call with one thread and this checkout on its path."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PYTHONPATH")}
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
    return context


def _run_rank(
    rank: int, count: int, folder: Path, sender: Connection, body: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """One rank. It never returns: helper threads and process groups must not keep a finished rank alive."""
    _redirect(folder / f"rank-{rank}.log")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), count),
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=COLLECTIVE_DEADLINE_S),
        )
        result = body(*arguments)
        if dist.is_initialized():
            dist.barrier()
        sender.send((True, result))
        status = 0
    except BaseException:  # noqa: BLE001 (whatever it is, the test must hear of it)
        sender.send((False, traceback.format_exc()))
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _redirect(log: Path) -> None:
    """What the rank prints goes to `log`, and so do the stacks of all threads on SIGUSR1."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)


def _end_with_parent() -> None:
    """A killed pytest takes its ranks along: their parent by kinship is the fork server, which does not notice."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _kill_tree(pid: int) -> None:
    try:
        root = psutil.Process(pid)
        tree = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
