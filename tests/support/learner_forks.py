"""The learner's role and its ranks, forked from a process that has Megatron loaded: ten seconds of a core less a run.

    test ── ForkedLearner(command) ──▶ fork server of tests.support.ranks
                                           └──fork──▶ the role: `evenkeel role learner RUN`, with environment and log
                                                          └──fork──▶ its ranks, with what torchrun would tell them

What is left out is torchrun itself, which runs in the tests that start `evenkeel train` as a process.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from launch.roles import learner as product
from launch.run.processes import end_tree
from pipeline.child_process import die_with_parent
from rollout_sglang.server.start import free_ports
from tests.support.rank_programs import parse, run_program
from tests.support.ranks import forkserver_context

IGNORED = (signal.SIGTERM, signal.SIGINT)
"""By ranks: see launch.roles.learner."""


class ForkedLearner:
    """A learner's role that is a child of the fork server (launch.run.starter.Started)."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        role = list(command[command.index("role") :])
        self._process = forkserver_context().Process(target=_become_role, args=(role, dict(environment), log))
        self._process.start()

    def poll(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        if self._process.pid is not None and self._process.exitcode is None:
            end_tree(self._process.pid)
        self._process.kill()
        self._process.join()


class RanksOfRole:
    """In place of torchrun, in a role that has Megatron loaded: one child a rank; when one fails, all end."""

    def __init__(
        self, command: Sequence[str], log: Path | None, environment: Mapping[str, str], *, own_session: bool
    ) -> None:
        assert log is not None, "a supervisor names the log of a role"
        assert own_session, "a role starts its ranks in a session of their own"
        count, module, arguments = parse(command)
        [port] = free_ports(1)
        meeting_point = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(count))
        self._status: int | None = None
        ranks = []
        for rank in range(count):
            place = meeting_point | dict(RANK=str(rank), LOCAL_RANK=str(rank))
            ranks.append(_fork(_rank(module, arguments, dict(environment) | place, log)))
        self._rank_zero, self._left = ranks[0], set(ranks)

    @property
    def pid(self) -> int:
        """Of rank 0; `kill` ends the others."""
        return self._rank_zero

    def poll(self) -> int | None:
        for child in list(self._left):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                self._left.discard(child)
                if self._status is None and os.waitstatus_to_exitcode(status) != 0:
                    self._status = 1
                    self.kill()
        if not self._left and self._status is None:
            self._status = 0
        return self._status

    def kill(self) -> None:
        for child in list(self._left):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            self._left.discard(child)


def _rank(module: str, arguments: list[str], environment: dict[str, str], log: Path) -> Callable[[], None]:
    def body() -> None:
        os.setsid()
        die_with_parent()
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        os.environ.clear()
        os.environ.update(environment)
        run_program(module, arguments, environment, log)

    return body


def _fork(body: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        _end_with(body)
    return child


def _end_with(body: Callable[[], None]) -> NoReturn:
    """Run the body, and end this process as a program would."""
    status = 1
    try:
        body()
        status = 0
    except SystemExit as asked:
        status = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
    except BaseException:  # noqa: BLE001 - `os._exit` would discard it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _become_role(role: list[str], environment: dict[str, str], log: Path) -> None:
    from launch import cli

    os.setsid()
    die_with_parent()
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["evenkeel", *role]
    product._Torchrun = RanksOfRole  # type: ignore[assignment, misc]
    _end_with(cli.main)
