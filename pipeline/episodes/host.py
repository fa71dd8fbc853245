"""Run a user's environment or agent in processes that can be killed: a fork for each episode, in a sandbox.

    collector ◀──a socket for each episode──▶ child: environment or agent, its own asyncio loop
        └──control socket──▶ host: forks a child for each socket that it is given

The host imports the user's code once; under Landlock, which lets confined code start no process, each child does.

Such code loops, blocks and crashes. In the collector it would stop every request to the engines; here it costs its own
episode. The end of its socket kills a child with all that it started, whoever closes it. The host ends with the control
socket, hence with the collector; a host that died is started again for the next episode.

Messages are JSON, in frames of a length and its bytes:

    {"reset": task}, {"step": message}          to an environment, which answers {"ok": …} or {"failed": "why"}
    {"run": task}                               to an agent, which ends with {"ok": reward} or {"failed": "why"}
    {"ask": number, "messages": …, "tools": …}  from an agent, answered by {"number": …, "message" | "error": …}
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from pipeline.child_process import die_with_parent, kill_and_wait, make_scratch
from pipeline.errors import RecipeError, RetryableError
from pipeline.rewards.calling import describe_error
from pipeline.rewards.children import empty, kill_children, prepare_child, remove
from pipeline.rewards.messages import START_DEADLINE_S, Channel, ChannelClosedError, ChannelTimeoutError
from pipeline.rewards.sandbox.confine import Confinement
from pipeline.rewards.worker_process import ConfinedPython, Sandbox
from precision.text import one_line

MAX_MESSAGE_BYTES = 64 * 2**20
"""Largest message between a child and the collector."""
_MAX_SETTINGS_BYTES = 2**20
_HEADER_BYTES = 4
_END_DEADLINE_S = 5.0
_LOOK_S = 0.2
_FORK, _CLEAN = b"f", b"c"
"""What the collector asks of a host: to fork a child for the socket that comes along, or to end all children."""
_PR_SET_CHILD_SUBREAPER = 36


class EpisodeFailedError(RetryableError):
    """The environment or agent of an episode failed, or its process died. The episode has no reward."""


class HostDiedError(EpisodeFailedError):
    """The process that forks all episodes died, and this one with it. That is no fault of the episode."""


class Pipe:
    """One end of the socket of an episode, in an event loop."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, control: socket.socket | None
    ) -> None:
        self._reader, self._writer, self._control = reader, writer, control

    @staticmethod
    async def of(end: socket.socket, control: socket.socket | None = None) -> Pipe:
        """Return a pipe over one end of a socket, which it owns. `control` is the socket of the host of the process at
        the other end."""
        return Pipe(*await asyncio.open_connection(sock=end), control)

    def _ended(self) -> EpisodeFailedError:
        """Return the error of a lost connection. A process that dies closes its files before its children die."""
        if self._control is not None:
            poll = select.poll()
            if self._control.fileno() >= 0:
                poll.register(self._control, select.POLLRDHUP)
            if self._control.fileno() < 0 or poll.poll(0):
                return HostDiedError("the process of all episodes ended")
        return EpisodeFailedError("its process ended")

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises EpisodeFailedError when the other end is gone, or for a message that is too long."""
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise EpisodeFailedError(f"a message has {len(data)} bytes, expected at most {MAX_MESSAGE_BYTES}")
        self._writer.write(len(data).to_bytes(_HEADER_BYTES, "big") + data)
        try:
            await self._writer.drain()
        except OSError:
            raise self._ended() from None

    async def receive(self) -> dict[str, Any]:
        """Return the next message. Raises EpisodeFailedError when the other end is gone or sends something else."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_HEADER_BYTES), "big")
            if length > MAX_MESSAGE_BYTES:
                raise EpisodeFailedError(f"it sent {length} bytes, expected at most {MAX_MESSAGE_BYTES}")
            message = json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            raise self._ended() from None
        except (ValueError, RecursionError):
            raise EpisodeFailedError("it sent what is not JSON") from None
        if not isinstance(message, dict):
            raise EpisodeFailedError("it sent what is not a JSON object")
        return message

    def close(self) -> None:
        self._writer.close()


class EpisodeHost:
    """A context manager of the process that runs `package.module:name` for all episodes of a run."""

    def __init__(self, code: str, memory_mib: int, sandbox: Sandbox | None) -> None:
        """Start the process. Raises RecipeError when it cannot import the user's code."""
        self._code, self._memory_mib = code, memory_mib
        self._python = ConfinedPython("pipeline.episodes.host", code, sandbox)
        self._control: socket.socket | None = None
        self._process: Any = None
        self._scratch: Path | None = None
        self._starting = threading.Lock()
        self._start()

    def _start(self) -> None:
        self.close()
        answer = self._begin() or self._begin() or {"failed": "its process ended"}
        if "failed" in answer:
            raise RecipeError(
                f"episode code {self._code!r} cannot be imported: {one_line(answer['failed'], 500)}; correct it, "
                "install its package, or name another package.module:name (docs/agents.md)"
            )

    def _begin(self) -> dict[str, str] | None:
        """Start the process and return its answer; None when it ended without one, as it does when it is killed."""
        given, taken = socket.socketpair()
        control, theirs = socket.socketpair()
        with given, taken, theirs:
            self._process = self._python.start(taken)
            socket.send_fds(given, [_FORK], [theirs.fileno()])
        channel, answer = Channel(os.dup(control.fileno())), None
        settings = self._python.settings | dict(code=self._code, memory_mib=self._memory_mib)
        try:
            channel.send(json.dumps(settings).encode(), START_DEADLINE_S)
            answer = json.loads(channel.receive(_MAX_SETTINGS_BYTES, START_DEADLINE_S))
        except ChannelClosedError:
            pass
        except ChannelTimeoutError:
            answer = {"failed": "its process hangs"}
        finally:
            channel.close()
        if answer is None or "failed" in answer:
            control.close()
            self._bury()
        else:
            control.setblocking(True)
            self._scratch, self._control = Path(answer["scratch"]), control
        return answer

    async def open(self) -> Pipe:
        """Return the pipe to a fresh child, of a fresh process where that has died. Raises EpisodeFailedError where it
        cannot be asked, and RecipeError as at the start."""
        mine, theirs = socket.socketpair()
        with theirs:
            for last in (False, True):
                control = self._control
                try:
                    if control is None:
                        raise ConnectionError("it is being started")
                    socket.send_fds(control, [_FORK], [theirs.fileno()])
                    break
                except OSError as error:
                    if last:
                        mine.close()
                        raise EpisodeFailedError(f"the process of environments cannot be asked: {error}") from error
                    await asyncio.to_thread(self._start_again, control)
        return await Pipe.of(mine, control)

    def _start_again(self, control: socket.socket | None) -> None:
        """Start the process anew, unless another episode has done so since its socket was `control`."""
        with self._starting:
            if self._control is control:
                self._start()

    def clean(self) -> bool:
        """Kill all children with all that they started, and empty the folder. Return whether that succeeded."""
        if self._control is None:
            return False
        self._control.settimeout(_END_DEADLINE_S)
        try:
            self._control.send(_CLEAN)
            return self._control.recv(1) == _CLEAN
        except OSError:
            return False
        finally:
            self._control.settimeout(None)

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
            self._bury()

    def _bury(self) -> None:
        """Wait for the end of the process, which has lost its socket, and remove what it left."""
        try:
            self._process.wait(_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            kill_and_wait(self._process)
        self._process.stderr.close()
        if self._scratch is not None and self._scratch != Path("/tmp"):
            remove(self._scratch)
        self._scratch = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> None:
    """Take a socket from the one at standard input, read the settings from it, import the user's code, then fork a
    child for each socket that comes over it, until it closes.

    Bubblewrap's own process keeps standard input until it ends: there, an episode could ask a host that is dead."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the run handles them; Slurm signals every process
    with socket.socket(fileno=os.dup(0)) as given:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        _, [descriptor], _, _ = socket.recv_fds(given, 1, 1)
    control, channel = socket.socket(fileno=descriptor), Channel(os.dup(descriptor))
    settings = json.loads(channel.receive(_MAX_SETTINGS_BYTES, START_DEADLINE_S))
    scratch = Path("/tmp")
    if settings["rung"] != "bubblewrap":
        scratch = make_scratch("episode")
    # Under bubblewrap the user's folder may be mounted somewhere below /tmp.
    settings |= dict(scratch=str(scratch), mounted=os.listdir(scratch))
    os.environ.update(HOME=str(scratch), TMPDIR=str(scratch))
    code = None
    if settings["rung"] == "landlock":
        answer = _tried(settings)
    else:
        if settings["rung"] is None:
            die_with_parent(settings["run_pid"])
        code, answer = _loaded(settings)
    channel.send(json.dumps(answer).encode(), START_DEADLINE_S)
    if "failed" not in answer:
        channel.close()
        _serve(control, settings, code)


def _loaded(settings: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """Confine this process, import the user's code, and return it with the answer to the collector."""
    try:
        if settings["rung"] is not None:
            Confinement.of(settings, Path(settings["scratch"])).enter()
        os.chdir(settings["folder"])
        sys.path[:] = settings["path"]
        module, _, name = settings["code"].partition(":")
        code = getattr(importlib.import_module(module), name)
        _check(code, settings["code"])
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever an import raised is the answer
        return None, {"failed": describe_error(error)}
    return code, {"scratch": settings["scratch"]}


def _tried(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the answer of a child that has imported the user's code, for a host that must not be confined."""
    mine, theirs = socket.socketpair()
    host, pid = os.getpid(), os.fork()
    if pid == 0:
        descriptor = theirs.detach()
        prepare_child([descriptor])
        die_with_parent(host)
        os.write(descriptor, json.dumps(_loaded(settings)[1]).encode())
        os._exit(0)
    theirs.close()
    with mine:
        mine.settimeout(START_DEADLINE_S)
        try:
            data = mine.recv(1 << 16)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            data = b""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return dict(json.loads(data)) if data else {"failed": f"its process ended with status {status}"}


def _check(code: Any, name: str) -> None:
    """Raise TypeError for code that is neither an environment nor an agent."""
    if inspect.isclass(code):
        if missing := [one for one in ("reset", "step") if not inspect.iscoroutinefunction(getattr(code, one, None))]:
            raise TypeError(f"{name} has no `async def {missing[0]}`: an environment has reset(task) and step(message)")
    elif not inspect.iscoroutinefunction(code):
        raise TypeError(f"{name} is neither a class nor an `async def run(client, task)`")


def _serve(control: socket.socket, settings: Mapping[str, Any], code: Any) -> None:
    """Fork a child for each socket that comes over `control`; kill it, and all that it started, when the collector has
    closed the other end."""
    control.setblocking(True)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    children: dict[int, tuple[int, socket.socket]] = {}
    """Descriptor of the child's socket → its process and the socket."""
    open_ = True
    while open_:
        ready = {descriptor for descriptor, _ in poll.poll(_LOOK_S * 1000)}
        if control.fileno() in ready:
            try:
                data, ends, _, _ = socket.recv_fds(control, 1, 1)
            except OSError:
                data, ends = b"", []
            open_ = bool(data)
            if data == _CLEAN:
                for _, end_of_child in children.values():
                    poll.unregister(end_of_child)
                    end_of_child.close()
                children.clear()
                with suppress(OSError):  # else the collector closes this host
                    _end_all(settings)
                    control.send(_CLEAN)
            for end in ends:
                host, pid = os.getpid(), os.fork()
                if pid == 0:
                    _become_child(end, settings, code, host)
                children[end] = pid, socket.socket(fileno=end)
                poll.register(end, select.POLLRDHUP)
        dead = _reap()
        with suppress(OSError):  # what an earlier child has left to this process
            kill_children({pid for pid, _ in children.values()})
        for descriptor, (pid, end_of_child) in list(children.items()):
            if descriptor in ready or pid in dead or not open_:
                del children[descriptor]
                poll.unregister(descriptor)
                end_of_child.close()  # the collector sees the end
                for kill in (os.killpg, os.kill) if pid not in dead else (os.killpg,):
                    with suppress(ProcessLookupError, PermissionError):
                        kill(pid, signal.SIGKILL)
    with suppress(OSError):
        kill_children()


def _end_all(settings: Mapping[str, Any]) -> None:
    """Kill every process of this host, and empty its folder. Raises OSError when some file stays."""
    if settings["rung"] == "bubblewrap":  # one call for all: no fork bomb can outrun it
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    ends = time.monotonic() + _END_DEADLINE_S / 2
    while _reap() | kill_children():
        if time.monotonic() > ends:
            raise OSError("processes do not end")
        time.sleep(0.001)
    scratch = Path(settings["scratch"])
    empty(scratch, frozenset(settings["mounted"]))
    if set(os.listdir(scratch)) - {*settings["mounted"]}:
        raise OSError("files cannot be removed")


def _reap() -> set[int]:
    """Return the children that have ended."""
    dead = set[int]()
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            dead.add(pid)
    return dead


def _become_child(descriptor: int, settings: Mapping[str, Any], code: Any, host: int) -> NoReturn:
    """Serve one episode over the socket, then end. `code` is None where it is still to be imported."""
    status = 1
    try:
        prepare_child([descriptor])
        die_with_parent(host)  # if that is killed, nobody else ends a child that is stuck
        code = code or _loaded(settings)[0]
        asyncio.run(_episode(socket.socket(fileno=descriptor), code))
        status = 0
    finally:
        os._exit(status)


async def _episode(end: socket.socket, code: Any) -> None:
    pipe = await Pipe.of(end)
    environment = None
    with suppress(EpisodeFailedError):  # the collector has closed the pipe
        while True:
            request = await pipe.receive()
            try:
                if "run" in request:
                    client = Client(pipe, request.get("endpoint") or {})
                    answer = await client.during(code(client, request["run"]))
                elif "reset" in request:
                    environment = code(**request.get("options", {}))
                    answer = dict(
                        messages=await environment.reset(request["reset"]), tools=getattr(environment, "tools", ())
                    )
                else:
                    assert environment is not None
                    answer = await environment.step(request["step"])
                await pipe.send({"ok": answer})
            except EpisodeFailedError:
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code; its error is the answer
                await pipe.send({"failed": describe_error(error)})


class Client:
    """What an agent's `run(client, task)` asks the policy with."""

    def __init__(self, pipe: Pipe, endpoint: Mapping[str, str]) -> None:
        self._pipe, self._asked = pipe, dict[int, asyncio.Future[dict[str, Any]]]()
        self.base_url, self.api_key = endpoint.get("base_url", ""), endpoint.get("api_key", "")
        """The gateway for a library of OpenAI's protocol; empty where the sandbox has no network."""

    async def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> dict[str, Any]:
        """Return the policy's message after `messages`, in the shapes of OpenAI's chat completions. Raises EndedError
        when the episode has used up a budget."""
        number, future = len(self._asked), asyncio.get_running_loop().create_future()
        self._asked[number] = future
        await self._pipe.send({"ask": number, "messages": [*messages], "tools": [*tools]})
        answer = await future
        if "error" in answer:
            raise EndedError(answer["error"])
        return dict(answer["message"])

    async def during(self, run: Awaitable[Any]) -> Any:
        """Return the result of `run`, while answers are handed to its calls of `chat`."""
        work, answers = asyncio.ensure_future(run), asyncio.create_task(self._deliver())
        try:
            await asyncio.wait((work, answers), return_when=asyncio.FIRST_COMPLETED)
            if answers.done() and not work.done():
                await answers
            return await work
        finally:
            for task in (work, answers):
                task.cancel()
            await asyncio.gather(work, answers, return_exceptions=True)

    async def _deliver(self) -> None:
        while True:
            answer = await self._pipe.receive()
            self._asked[answer["number"]].set_result(answer)


class EndedError(Exception):
    """The episode has ended: a budget is used up. An agent need not catch it."""
