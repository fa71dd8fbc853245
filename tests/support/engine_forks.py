"""Real SGLang servers, forked from a process that has SGLang loaded: a second each in place of seven.

    test ── start_engine(spec) ──▶ fork server (stock SGLang imported, equipped by rollout_sglang.cpu.cpu_server)
                                       └──fork──▶ the server: argv, environment and log as the product gives them

What is forked is what `rollout_sglang.server.start.start` would have started, and it dies with the test, like its
model. Where `evenkeel train` runs in the test's own process, its engine roles are forked the same way; each forks its
server. The learner's role is forked, too (tests.support.learner_forks). Everything starts as the product does where
EVENKEEL_ROLLOUT_PYTHON names another Python.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from launch.roles import lifecycle
from launch.run import starter
from launch.run.processes import end_tree
from pipeline.child_process import die_with_parent
from pipeline.errors import EngineStartError
from rollout_sglang.server import start as product
from rollout_sglang.server.rollout_python import rollout_python
from rollout_sglang.server.start import ServerProcess
from tests.support.learner_forks import ForkedLearner

ROOT = Path(__file__).parents[2]
SERVER = "rollout_sglang.cpu.cpu_server"
STARTS = 3
"""How often a server is started until it comes up."""
_OWN_PROCESS = starter._Child


class ForkedServer(ServerProcess):
    """A server that is a child of the fork server, with the interface of one that is ours."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        ready_url: str,
        secret: str | None,
        scratch: Path | None = None,
    ) -> None:
        self.log, self._scratch = log, scratch
        self._ready_url, self._secret = ready_url, secret
        python, *flags, module = command[:4]
        assert (python, *flags, module) == (sys.executable, "-P", "-m", SERVER), command
        arguments = list(command[4:])
        log.parent.mkdir(parents=True, exist_ok=True)
        self._order = dict(arguments=arguments, environment=dict(environment), log=str(log))
        self._start()

    def _start(self) -> None:
        assert self.log is not None
        self.log_begin = self.log.stat().st_size if self.log.exists() else 0
        self._server = psutil.Process(_fork(self._order))

    def wait_ready(self, deadline_s: float) -> float:
        """As the product does, which starts an engine again that did not come up: a busy machine may end a start."""
        for _ in range(STARTS - 1):
            with suppress(EngineStartError):
                return super().wait_ready(deadline_s)
            self._start()
        return super().wait_ready(deadline_s)

    @property
    def pid(self) -> int:
        return int(self._server.pid)

    def poll(self) -> int | None:
        """None while it runs. The status is the fork server's to know."""
        return None if self._server.is_running() else 1

    def stop(self) -> None:
        self.kill()

    def kill(self) -> None:
        try:
            self._server.kill()
            self._server.wait(20)
        except psutil.NoSuchProcess:
            pass
        self._clean()


class ForkedRole:
    """An engine's role that is a child of the fork server (launch.run.starter.Started)."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        self._status = log.with_suffix(".status")
        log.parent.mkdir(parents=True, exist_ok=True)
        role = list(command[command.index("role") :])
        order = dict(role=role, environment=dict(environment), log=str(log), status=str(self._status))
        self._process = psutil.Process(_fork(order))

    def poll(self) -> int | None:
        """None while it runs."""
        if self._process.is_running():
            return None
        return int(self._status.read_text()) if self._status.exists() else -signal.SIGKILL

    def terminate(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self._process.terminate()

    def kill(self) -> None:
        end_tree(self._process.pid)
        with suppress(psutil.NoSuchProcess):
            self._process.kill()
            self._process.wait(20)


class ServerOfRole(ServerProcess):
    """A server that is a child of a forked role, in which SGLang is loaded already."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path | None,
        ready_url: str,
        secret: str,
        scratch: Path | None = None,
    ) -> None:
        self._scratch = scratch
        assert log is not None, "a supervisor names the log of a role"
        self.log = log
        self._ready_url, self._secret = ready_url, secret
        self._ended: int | None = None
        self._child = os.fork()
        if self._child == 0:
            _become_server(list(command[4:]), dict(environment), str(log))

    @property
    def pid(self) -> int:
        return self._child

    def poll(self) -> int | None:
        if self._ended is None and (found := os.waitpid(self._child, os.WNOHANG))[0]:
            self._ended = os.waitstatus_to_exitcode(found[1])
        return self._ended

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self._child, signal.SIGTERM)

    def stop(self) -> None:
        self.kill()

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self._child, signal.SIGKILL)
            self._ended = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        self._clean()


def start_engine(spec: product.EngineSpec) -> ServerProcess:
    """`rollout_sglang.server.start.start`, by a fork where that is possible."""
    with forked_engines():
        return product.start(spec)


@contextmanager
def forked_engines() -> Iterator[None]:
    """While it is open, the product's `start` forks servers where that is possible, and `train` the engines' roles and
    the learner's."""
    if rollout_python() is not None or product.has_cuda():
        yield
        return
    with patch.object(product, "ServerProcess", _server), patch.object(starter, "_Child", _unit):
        yield


def _unit(command: Sequence[str], log: Path, environment: Mapping[str, str], **settings: Any) -> starter.Started:
    """Routers and collectors start as ever: they import little."""
    role = command[command.index("role") + 1]
    if role == "engine":
        return ForkedRole(command, log, environment)
    if role == "learner":
        return ForkedLearner(command, log, environment)
    return _OWN_PROCESS(command, log, environment, **settings)


def _server(command: Sequence[str], **settings: Any) -> ServerProcess:
    """Routers are not SGLang's server: they start as ever."""
    kind = ForkedServer if SERVER in command else ServerProcess
    return kind(command, **settings)


@cache
def _fork_server() -> subprocess.Popen[str]:
    """Started once a process of pytest, with which it ends: its standard input is then closed."""
    environment = product.server_environment(None) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.support.engine_forks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
        text=True,
    )


def _fork(order: dict[str, object]) -> int:
    server = _fork_server()
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(order), file=server.stdin, flush=True)
    answer = server.stdout.readline()
    assert answer, f"the fork server ended with {server.wait(20)}"
    return int(answer)


def serve_orders() -> None:
    """The fork server: a line of JSON comes in, a process id goes out."""
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "r+", encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)  # what imports print is not an answer
    for name in [name for name in sys.modules if name.partition(".")[0] == "prometheus_client"]:
        del sys.modules[name]  # where SGLang's processes share numbers is settled when it is imported: by SGLang
    from rollout_sglang.cpu.cpu_server import prepare

    prepare()
    import sglang.launch_server  # noqa: F401
    import sglang.srt.entrypoints.http_server  # noqa: F401 (the server's own imports)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries servers that were killed
    while line := orders.readline():
        pid = os.fork()
        if pid == 0:
            orders.close()
            answers.close()
            order = json.loads(line)
            (_become_role if "role" in order else _become_server)(**order)
        print(pid, file=answers)


def _become_role(role: list[str], environment: dict[str, str], log: str, status: str) -> None:
    from launch import cli

    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _write_to(log)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["evenkeel", *role]

    def end(number: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        Path(status).write_text(str(number), encoding="utf-8")
        os._exit(number)

    product.ServerProcess = ServerOfRole  # type: ignore[misc, assignment]
    lifecycle.end_process = end  # type: ignore[assignment]
    try:
        cli.main()
    except SystemExit as asked:
        end(asked.code if isinstance(asked.code, int) else 1)
    except BaseException:  # noqa: BLE001 - `os._exit` would discard it
        traceback.print_exc()
    end(1)


def _write_to(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)


def _become_server(arguments: list[str], environment: dict[str, str], log: str) -> None:
    from rollout_sglang.cpu.cpu_server import CPU_ENVIRONMENT
    from rollout_sglang.server.launch_server import serve
    from tests.support.engine_faults import install_fault

    os.setsid()
    die_with_parent()
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    _write_to(log)
    os.environ.clear()
    os.environ.update({**CPU_ENVIRONMENT, **environment})
    tempfile.tempdir = None  # which this process was told before it was forked
    sys.argv = [SERVER, *arguments]
    install_fault()
    status = 1
    try:
        serve([*arguments, "--decode-log-interval", "1"])  # for support.engines.wait_for_decode
        status = 0
    except BaseException:  # noqa: BLE001 - `os._exit` would discard it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve_orders()
