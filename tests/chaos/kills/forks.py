"""The programs of a run as forks of a process that has everything imported: a restart costs a second, not ten.

    zygote (SGLang, Megatron, launch: imported once) ──fork──▶ case ──▶ supervisor ──▶ roles ──▶ servers, ranks

`subprocess.Popen` of pipeline.child_process is what every program of a run is started by. `ForkPopen` takes its place:
same argv, environment, session, output and death with the parent; the product's code above and below it is unchanged.
Left out are exec and torchrun, which the cases named `exec-…` have.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from tests.chaos.kills import hooks

TORCHRUN = ("torch.distributed.run", "launch.run.torchrun")
_WRAPPER = "child_process.py"
_EXEC = subprocess.Popen
_POLL_S = 0.02
_PR_SET_NAME = 15


def preload() -> None:
    """Import what all programs of a run need, in a process without threads."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from rollout_sglang.cpu.cpu_server import prepare

    prepare()
    import sglang.launch_server  # noqa: F401
    import sglang.srt.entrypoints.http_server  # noqa: F401 (the server's own imports)

    gc.collect()
    gc.freeze()


def install() -> None:
    """From now on, this process and its forks start the programs of a run by fork."""
    from pipeline import child_process

    class Shim:
        Popen = staticmethod(popen)

        def __getattr__(self, name: str) -> Any:
            return getattr(subprocess, name)

    child_process.subprocess = Shim()  # type: ignore[attr-defined]


def popen(command: Sequence[str], **options: Any) -> Any:
    """A fork where the module is one that is loaded, else subprocess.Popen."""
    wrapped = next((place for place, word in enumerate(command) if word.endswith(_WRAPPER)), None)
    if wrapped is not None:
        inner = list(command[wrapped + 4 :])
        body = _body(inner)
        if body is not None:
            number, parent, ignored = command[wrapped + 1 : wrapped + 4]
            return ForkPopen(inner, body, int(number), int(parent), ignored, **options)
    return _EXEC(command, **options)


def _body(command: Sequence[str]) -> Callable[[list[str]], None] | None:
    if "-m" not in command:
        return None
    module = command[list(command).index("-m") + 1]
    bodies = {"launch.cli": _cli, "rollout_sglang.cpu.cpu_server": _serve, **dict.fromkeys(TORCHRUN, _ranks)}
    return bodies.get(module)


class ForkPopen:
    """What ChildProcess asks of subprocess.Popen."""

    def __init__(
        self,
        command: list[str],
        body: Callable[[list[str]], None],
        death_signal: int,
        parent: int,
        ignored: str,
        *,
        env: Mapping[str, str],
        stdout: int | None = None,
        start_new_session: bool = False,
        **_: Any,
    ) -> None:
        self.args = command
        self.returncode: int | None = None

        def begin() -> None:
            if start_new_session:
                os.setsid()
            die_with(parent, death_signal)
            for name in filter(None, ignored.split(",")):
                signal.signal(int(name), signal.SIG_IGN)
            body(command)

        self.pid = fork(begin, command, env, stdout)

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        ends = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if ends is not None and time.monotonic() > ends:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(
    body: Callable[[], object],
    command: Sequence[str],
    env: Mapping[str, str],
    output: int | None,
    keep: Sequence[int] = (),
) -> int:
    """Run `body` in a child as a program of its own: signals, environment, standard streams. Returns its process id."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _become_program(command, env, output, keep)
        body()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - `os._exit` would discard it
        traceback.print_exc()
    finally:
        _end(status)


def _end(status: int) -> NoReturn:
    with suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _become_program(command: Sequence[str], env: Mapping[str, str], output: int | None, keep: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    gc.freeze()  # what the parent held stays as it is
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
    _let_go(set(keep))
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(n, "w", closefd=False), write_through=True, encoding="utf-8") for n in (1, 2)
    )
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # which this process was told before it was forked
    sys.argv = [*command]
    sys.orig_argv = [*command]
    name = hooks.name_of(sys.orig_argv, os.environ)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, (name or "program").encode(), 0, 0, 0)  # its command line is the zygote's
    hooks.arm(name)


def _let_go(keep: set[int]) -> None:
    """Let go of the parent's files and sockets, but not of their numbers: the parent's objects, which live on here,
    may close those."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (nothing, *keep):
            with suppress(OSError):
                os.fstat(int(name))  # not that of the listing, which is closed by now
                os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


def die_with(parent: int, number: int) -> None:
    """As the wrapper in pipeline.child_process does."""
    from pipeline.child_process import die_with_parent

    die_with_parent(parent, number)


# -------------------------------------------------------------------------------------------------------- the programs


def _cli(command: list[str]) -> None:
    from launch import cli

    sys.argv = ["evenkeel", *command[command.index("launch.cli") + 1 :]]
    cli.main()


def _serve(command: list[str]) -> None:
    from rollout_sglang.cpu.cpu_server import CPU_ENVIRONMENT
    from rollout_sglang.server.launch_server import serve

    os.environ.update({**CPU_ENVIRONMENT, **os.environ})
    arguments = command[command.index("-m") + 2 :]
    sys.argv = ["cpu_server", *arguments]
    serve(arguments)


def _ranks(command: list[str]) -> None:
    """What torchrun does on one machine: start the ranks, end all when one has failed."""
    count = int(command[command.index("--nproc-per-node") + 1])
    inner = command[len(command) - 1 - command[::-1].index("-m") :]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(count))
    pids = {}
    for rank in range(count):
        environment = {**common, "EVENKEEL_PARENT": str(os.getpid()), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        pids[fork(lambda: _run_module(inner), [sys.executable, *inner], environment, None)] = rank
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid, None)
        if rank is not None and status:
            print(f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}", flush=True)
            for other in pids:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
            _end(1)


def _run_module(command: list[str]) -> None:
    sys.argv = command[1:]
    runpy.run_module(command[1], run_name="__main__", alter_sys=True)


def run_cli(command: list[str], parent: int) -> None:
    """Body of a command that a case starts: `python -m launch.cli …`, in a session of its own."""
    os.setsid()
    die_with(parent, signal.SIGKILL)
    _cli(command)
