"""Supervise one run on one machine: engines, router, collector, learner.

Any of them may die at any time. A dead process is started again and reads from the run directory what it has to do. The
run ends when a process dies again and again without progress of the run, or when it left a fatal note. The same command
then resumes the run.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

from launch.build.engines import check_engines, engine_spec
from launch.run.live_view import LiveView
from launch.run.processes import child_environment, fatal_note, log_tail, read_fatal_note, torchrun
from pipeline.child_process import ChildProcess
from pipeline.config.recipe import Recipe
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import FatalError
from rollout_sglang.server.launch_server import API_KEY_VARIABLE
from rollout_sglang.server.process import ServerProcess, check_port_free, free_ports
from rollout_sglang.server.start import HOST, has_cuda, start, start_router

POLL_S = 0.25


@dataclass
class RestartBudget:
    """How often one process may die without progress of the run."""

    limit: int
    spent: int = 0
    progress: int = -1

    def spend(self, name: str, progress: int, reason: str) -> None:
        """Count one death. Progress of the run since the last one restarts the count. Raises FatalError at too many."""
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
    event_log: EventLog
    api_key: str = field(default_factory=lambda: os.environ.get(API_KEY_VARIABLE) or secrets.token_hex(24))
    ports: list[int] = field(default_factory=list)
    engines: list[ServerProcess] = field(default_factory=list)
    router: ServerProcess | None = None
    router_port: int | None = None
    starting: dict[str, Future[float]] = field(default_factory=dict)
    came_up: set[str] = field(default_factory=set)
    """Servers that were up once. Only these are started again when they die."""
    programs: dict[str, ChildProcess] = field(default_factory=dict)
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
        check_engines(self.recipe)
        self._start_engines()
        if not self._shares_gpus():
            self._start_program("learner")
        while len(self.programs) < 2 or any(program.poll() != 0 for program in self.programs.values()):
            self._restart_engines()
            self._restart_router()
            if not self.starting:
                self._start_missing()
            for name, program in list(self.programs.items()):
                if program.poll() not in (None, 0):
                    self._restart_program(name, program)
            self.view.refresh()
            time.sleep(POLL_S)
        self.view.refresh()

    def _shares_gpus(self) -> bool:
        """Whether learner and engines run on the same GPUs. An engine takes a share of the memory that is free when it
        starts, so nothing else may take memory meanwhile."""
        return self.recipe.weights.channel == "ipc" and has_cuda()

    def _start_missing(self) -> None:
        """What waits for the engines to be up."""
        if "learner" not in self.programs:
            self._start_program("learner")
        if "collector" not in self.programs:
            self._start_program("collector")  # before, it could only die of waiting, again and again

    def _start_engines(self) -> None:
        rollout = self.recipe.rollout
        count = rollout.engines + (rollout.engines > 1)  # one more for the router
        ports = free_ports(count) if rollout.port is None else [rollout.port + i for i in range(count)]
        for port in ports:
            check_port_free(port)
        self.ports = ports[: rollout.engines]
        self.engines = [self._start_engine(index) for index in range(rollout.engines)]
        self.router_port = ports[-1] if rollout.engines > 1 else None
        router = engine_url(self.router_port) if self.router_port else None
        self.run.write_engines([engine_url(port) for port in self.ports], router)

    def _start_engine(self, index: int) -> ServerProcess:
        """Start an engine with the version that the run serves now. A thread waits until it is ready."""
        spec = engine_spec(self.run, self.recipe, index, self.ports[index], self.api_key)
        engine = start(spec)
        self.starting[f"engine-{index}"] = self._await(engine)
        self.event_log.event("started", process=f"engine-{index}", version=spec.version)
        return engine

    def _await(self, server: ServerProcess) -> Future[float]:
        return self.waiters.submit(server.wait_ready, self.recipe.rollout.start_deadline_s)

    def _restart_engines(self) -> None:
        for name, ready in list(self.starting.items()):
            if ready.done():
                if name not in self.came_up:
                    ready.result()  # a server that never came up ends the run, with the end of its log
                self.came_up.add(name)
                del self.starting[name]
        for index, engine in enumerate(self.engines):
            name = f"engine-{index}"
            if name not in self.starting and engine.poll() is not None:
                self._spend(name, log_tail(self.run.logs / f"{name}.log"))
                self.engines[index] = self._start_engine(index)

    def _restart_router(self) -> None:
        """The router is started once all engines are up, since it refuses those that are not."""
        if self.router_port is None or self.starting or (self.router is not None and self.router.poll() is None):
            return
        log = self.run.logs / "router.log"
        if self.router is not None:
            self._spend("router", log_tail(log))
        urls = [engine_url(port) for port in self.ports]
        self.router = start_router(urls, self.router_port, self.api_key, log)
        self.starting["router"] = self._await(self.router)
        self.event_log.event("started", process="router")

    def _start_program(self, name: str) -> None:
        log = self.run.logs / f"{name}.log"
        env = {**child_environment(), API_KEY_VARIABLE: self.api_key}
        self.programs[name] = ChildProcess(program_command(name, self.run, self.recipe), log, env)
        self.event_log.event("started", process=name)

    def _restart_program(self, name: str, program: ChildProcess) -> None:
        if reason := read_fatal_note(self.run):
            raise FatalError(reason)
        self._spend(name, log_tail(program.log))
        self._start_program(name)

    def _spend(self, name: str, reason: str) -> None:
        self.event_log.event("restarted", process=name, reason=reason)
        progress = BatchStore(self.run.batches).next_index + self.run.published_version()
        self.budgets.setdefault(name, RestartBudget(self.recipe.run.max_restarts)).spend(name, progress, reason)


def engine_url(port: int) -> str:
    return f"http://{HOST}:{port}"


def program_command(name: str, run: RunDirectory, recipe: Recipe) -> list[str]:
    """The command of a program, as a cluster starts it too: the collector plainly, the learner under torchrun."""
    if name == "collector":
        return [sys.executable, "-m", "launch.run.collect", str(run.path)]
    return torchrun(recipe.learner.num_processes, "launch.run.learn", str(run.path))
