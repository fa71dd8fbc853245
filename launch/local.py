"""Supervise one run on one machine: engines, router, collector, learner.

Any of them may die at any time. A dead process is started again, and what it had in hand is derived anew from the run
directory; a process that dies again and again without the run getting on, or that left a fatal note, ends the run. The
same command then goes on from where the run was.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

from launch.processes import LoggedProcess, fatal_note, log_tail, read_fatal_note
from launch.progress import LiveView
from pipeline.errors import FatalError
from pipeline.journal import Journal
from pipeline.recipe import Recipe
from pipeline.rundir import RunDirectory
from pipeline.store import BatchStore
from rollout_sglang.server import EngineProcess, EngineSpec, RouterProcess, check_port_free, free_port, start, start_router

API_KEY_VARIABLE = "EVENKEEL_API_KEY"
POLL_S = 0.25


@dataclass
class RestartBudget:
    """How often one process may die before the run gets on again."""

    limit: int
    spent: int = 0
    progress: int = -1

    def spend(self, name: str, progress: int, reason: str) -> None:
        """Raises FatalError when the budget is gone; progress of the run refills it."""
        self.spent = 1 if progress > self.progress else self.spent + 1
        self.progress = progress
        if self.spent > self.limit:
            raise FatalError(f"{name} died {self.spent} times without progress: {reason}")


@dataclass
class Supervisor:
    """Owns the processes of a run; use as a context manager."""

    run: RunDirectory
    recipe: Recipe
    view: LiveView
    journal: Journal
    api_key: str = field(default_factory=lambda: os.environ.get(API_KEY_VARIABLE) or secrets.token_urlsafe(24))
    specs: list[EngineSpec] = field(default_factory=list)
    engines: list[EngineProcess] = field(default_factory=list)
    starting: dict[int, Future[None]] = field(default_factory=dict)
    router: RouterProcess | None = None
    programs: dict[str, LoggedProcess] = field(default_factory=dict)
    budgets: dict[str, RestartBudget] = field(default_factory=dict)
    waiters: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(thread_name_prefix="engine-start"))

    def __enter__(self) -> Self:
        fatal_note(self.run).unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for program in self.programs.values():
            program.stop()
        if self.router is not None:
            self.router.stop()
        for engine in self.engines:
            engine.stop()
        self.waiters.shutdown(wait=True, cancel_futures=True)

    def supervise(self) -> None:
        """Run to the end. Raises FatalError when it cannot be reached."""
        self._start_engines()
        for name in ("collector", "learner"):
            self._start_program(name)
        while any(program.popen.poll() != 0 for program in self.programs.values()):
            self._mend_engines()
            for name, program in list(self.programs.items()):
                if program.popen.poll() not in (None, 0):
                    self._mend_program(name, program)
            self.view.refresh()
            time.sleep(POLL_S)
        self.view.refresh()

    def _start_engines(self) -> None:
        rollout = self.recipe.rollout
        first = rollout.port
        ports = [free_port() if first is None else first + i for i in range(rollout.engines)]
        for port in ports:
            check_port_free(port)
        self.specs = [engine_spec(self.run, self.recipe, index, port, self.api_key) for index, port in enumerate(ports)]
        self.engines = [self._start_engine(index) for index in range(len(ports))]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        if len(urls) > 1:
            port = free_port() if first is None else first + rollout.engines
            check_port_free(port)
            self.router = start_router(urls, port, self.api_key, self.run.logs / "router.log")
        self.run.write_engines(urls, self.router.url if self.router else None)

    def _start_engine(self, index: int) -> EngineProcess:
        """Start with the version that the run serves now; readiness is awaited beside the loop."""
        version = self.run.published_version()
        spec = self.specs[index].serving(version, self.run.policy_directory(version))
        engine = start(spec)
        self.starting[index] = self.waiters.submit(engine.wait_ready, self.recipe.rollout.start_deadline_s)
        self.journal.event("started", process=f"engine-{index}", version=version)
        return engine

    def _mend_engines(self) -> None:
        for index, ready in list(self.starting.items()):
            if ready.done():
                del self.starting[index]
                ready.result()  # an engine that never came up ends the run, with the end of its log
        for index, engine in enumerate(self.engines):
            if index not in self.starting and not engine.alive:
                self._spend(f"engine-{index}", log_tail(engine.log))
                engine.stop()
                self.engines[index] = self._start_engine(index)
        if self.router is not None and not self.router.alive:
            self._spend("router", log_tail(self.router.log))
            self.router = start_router(self.router.worker_urls, self.router.port, self.api_key, self.router.log)

    def _start_program(self, name: str) -> None:
        log = self.run.logs / f"{name}.log"
        env = {**os.environ, API_KEY_VARIABLE: self.api_key, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        self.programs[name] = LoggedProcess.start(name, program_command(name, self.run, self.recipe), log, env)
        self.journal.event("started", process=name)

    def _mend_program(self, name: str, program: LoggedProcess) -> None:
        if reason := read_fatal_note(self.run):
            raise FatalError(reason)
        self._spend(name, log_tail(program.log))
        self._start_program(name)

    def _spend(self, name: str, reason: str) -> None:
        self.journal.event("restarted", process=name, reason=reason)
        progress = BatchStore(self.run.batches).next_index + self.run.published_version()
        self.budgets.setdefault(name, RestartBudget(self.recipe.run.max_restarts)).spend(name, progress, reason)


def program_command(name: str, run: RunDirectory, recipe: Recipe) -> list[str]:
    """How a cluster starts the same two programs: the collector plainly, the learner under torchrun."""
    if name == "collector":
        return [sys.executable, "-m", "launch.collect", str(run.path)]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"),
        *("--nproc-per-node", str(recipe.learner.num_processes), "-m", "launch.learn", str(run.path)),
    ]


def engine_spec(run: RunDirectory, recipe: Recipe, index: int, port: int, api_key: str) -> EngineSpec:
    """One engine of the recipe; which version it starts with is decided at each start."""
    raise NotImplementedError
