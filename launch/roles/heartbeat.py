"""The learner's agents, one a host, tell one another that they live, and how it ends.

    node 0          Peers   listens; a peer whose line did not come for DEAD_S seconds is gone, whatever TCP says
    node 1, 2, …    Peer    connects, and is gone for node 0, or has lost it, in the same way

Lines of JSON, one a second in both directions. Before the first one both sides show that they know the API key (HMAC
over a number that the other side has drawn), that they mean the same epoch, and which node this is.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from precision.text import parse_object

BEAT_S = 1.0
DEAD_S = 10.0
HANDSHAKE_S = 5.0
FAREWELL_S = 2.0
"""Longest wait until the last message has left."""
_POLL_S = 0.1


@dataclass(frozen=True)
class Verdict:
    """How the learner ended, as an exit status, and why."""

    status: int
    reason: str = ""


class Peers:
    """Node 0's side. Use as a context manager; what it has found is read from any thread."""

    def __init__(self, address: str, port: int, *, nodes: int, epoch: int, key: str | None) -> None:
        """Listens at once. Raises OSError when the port is taken."""
        self.joined: set[int] = set()
        self.lost: str | None = None
        """Which node is gone, and why that is known."""
        self.stop_asked = False
        """Whether a node was asked to end, which ends the learner."""
        self.verdict: Verdict | None = None
        """What the first node to fail said."""
        self._address, self._port, self._nodes, self._epoch, self._key = address, port, nodes, epoch, key
        self._started = False
        self._lines: dict[int, _Line] = {}
        self._server: asyncio.Server | None = None
        self._loop = _LoopThread("peers")
        try:
            self._loop.run(self._listen())
        except BaseException:
            self._loop.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._close(), FAREWELL_S)
        self._loop.close()

    @property
    def complete(self) -> bool:
        """Whether every other node has joined."""
        return len(self.joined) == self._nodes - 1

    def start_ranks(self) -> None:
        """Tell all nodes to start their ranks; from now on none may leave or join. One that has left just before is
        lost: the others are not told."""
        self._loop.run(self._start_ranks())

    def end(self, verdict: Verdict) -> None:
        """Tell all nodes how it ended."""
        with suppress(Exception):  # who does not hear it notices that node 0 is gone
            self._loop.run(self._tell(dict(status=verdict.status, reason=verdict.reason)), FAREWELL_S)

    def trouble(self) -> Verdict | None:
        """Why this node's ranks cannot go on: another node has failed, or is gone."""
        return self.verdict or (None if self.lost is None else Verdict(1, self.lost))

    def wait_for_trouble(self, deadline_s: float) -> Verdict | None:
        """What another node says once this one's ranks have failed, which may be the cause."""
        ends = time.monotonic() + deadline_s
        while (found := self.trouble()) is None and time.monotonic() < ends:
            time.sleep(_POLL_S)
        return found

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, self._address, self._port)

    async def _start_ranks(self) -> None:
        # On the loop's thread, where nodes join and leave: none does between this look and the message.
        self._started = True
        if self.complete:
            await self._tell(dict(go=True))
        else:
            self.lost = self.lost or "a node left before the ranks were started"

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for line in self._lines.values():
            line.close()

    async def _tell(self, message: dict[str, Any]) -> None:
        await asyncio.gather(*(line.send(message) for line in self._lines.values()), return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = _Line(reader, writer)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                node = await self._greet(line)
        except (OSError, ValueError, KeyError, TypeError, EOFError, TimeoutError):
            writer.close()
            return
        if self._started:
            self.lost = self.lost or f"node {node} was started again"
            with suppress(OSError):  # it waits for the next start then
                await line.send(dict(status=1, reason=self.lost))
            writer.close()
            return
        self._lines[node] = line
        self.joined.add(node)
        try:
            async with line.beating():
                while True:
                    self._take(node, await line.receive())
        except (OSError, ValueError, EOFError, TimeoutError) as error:
            self._gone(node, line, error)
        except asyncio.CancelledError:
            return  # it is closed; the server of asyncio would report it as an error

    async def _greet(self, line: _Line) -> int:
        """The node that has shown that it knows the key. Raises ValueError."""
        hello = await line.read()
        node, theirs, ours = int(hello["node"]), str(hello["nonce"]), secrets.token_hex(16)
        about = f"{self._epoch} {node} {theirs} {ours}"
        await line.send(dict(nonce=ours, proof=_proof(self._key, "node 0", about)))
        answer = await line.read()
        if not _is_shown(answer, _proof(self._key, "peer", about)):
            raise ValueError("wrong key")
        if not 0 < node < self._nodes:
            raise ValueError("no such node")
        return node

    def _take(self, node: int, message: dict[str, Any]) -> None:
        self.stop_asked = self.stop_asked or bool(message.get("stop"))
        if "status" in message:
            reason = f"node {node}: {message.get('reason', '')}"
            self.verdict = self.verdict or Verdict(message["status"], reason)

    def _gone(self, node: int, line: _Line, error: Exception) -> None:
        if self._lines.get(node) is not line:
            return  # it has come again meanwhile
        del self._lines[node]
        self.joined.discard(node)
        if self._started:
            self.lost = self.lost or f"node {node} is gone ({_why(error)})"


class Peer:
    """The side of node 1, 2, …; use as a context manager."""

    def __init__(self, host: str, port: int, *, node: int, epoch: int, key: str | None) -> None:
        """Connects. Raises OSError, TimeoutError or ValueError when node 0 is not there, or not this epoch's."""
        self.go = False
        """Whether node 0 has all nodes, so that ranks start."""
        self.verdict: Verdict | None = None
        self.lost: str | None = None
        self.stop_asked = False
        """Node 0 lets the ranks of all nodes end; this one does not ask its own."""
        self._host, self._port, self._node, self._epoch, self._key = host, port, node, epoch, key
        self._loop = _LoopThread("peer")
        self._line: _Line | None = None
        try:
            self._loop.run(self._connect(), HANDSHAKE_S)
        except BaseException:
            self._loop.close()
            raise
        self._loop.start(self._listen())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    def trouble(self) -> Verdict | None:
        """Why this node's ranks cannot go on, or that they need not."""
        return self.verdict or (None if self.lost is None else Verdict(1, self.lost))

    def ask_to_stop(self) -> None:
        """This node was asked to end: node 0 lets all ranks save and end."""
        self._tell(dict(stop=True))

    def end(self, verdict: Verdict) -> None:
        """Tell node 0 how this node's ranks ended."""
        self._tell(dict(status=verdict.status, reason=verdict.reason))

    def _tell(self, message: dict[str, Any]) -> None:
        if self._line is not None:
            with suppress(Exception):  # node 0 notices that this node is gone
                self._loop.run(self._line.send(message), FAREWELL_S)

    async def _connect(self) -> None:
        line = _Line(*await asyncio.open_connection(self._host, self._port))
        try:
            ours = secrets.token_hex(16)
            await line.send(dict(node=self._node, nonce=ours))
            answer = await line.read()
            about = f"{self._epoch} {self._node} {ours} {answer.get('nonce')}"
            if not _is_shown(answer, _proof(self._key, "node 0", about)):
                raise ValueError("it has another API key, or is of another start")
            await line.send(dict(proof=_proof(self._key, "peer", about)))
        except BaseException:
            line.close()
            raise
        self._line = line

    async def _listen(self) -> None:
        assert self._line is not None
        try:
            async with self._line.beating():
                while True:
                    message = await self._line.receive()
                    self.go = self.go or bool(message.get("go"))
                    if "status" in message:
                        self.verdict = Verdict(message["status"], str(message.get("reason", "")))
        except (OSError, ValueError, EOFError, TimeoutError) as error:
            self.lost = f"node 0 is gone ({_why(error)})"


class _Line:
    """Messages over one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")
        await self._writer.drain()

    async def read(self) -> dict[str, Any]:
        """The next message. Raises EOFError at the end, ValueError for what is none."""
        text = await self._reader.readline()
        if not text.endswith(b"\n"):
            raise EOFError("the connection was closed")
        message = parse_object(text)
        if type(message.get("status", 0)) is not int:
            raise ValueError("its status is no number")
        return message

    async def receive(self) -> dict[str, Any]:
        """The next message. Raises TimeoutError when none comes for DEAD_S seconds."""
        # In Python 3.11 asyncio.wait_for loses a cancellation that comes together with the message.
        async with asyncio.timeout(DEAD_S):
            return await self.read()

    def beating(self) -> _Beat:
        return _Beat(self)

    def close(self) -> None:
        self._writer.close()


class _Beat:
    """While it is open, a message goes out every second. The connection is closed with it."""

    def __init__(self, line: _Line) -> None:
        self._line = line

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._beat())

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await self._task
        self._line.close()

    async def _beat(self) -> None:
        with suppress(OSError):  # the reader notices
            while True:
                await self._line.send({})
                await asyncio.sleep(BEAT_S)


class _LoopThread:
    """An event loop in a thread of its own, which no process waits for."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[Any] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, None], deadline_s: float | None = None) -> None:
        """Wait for `work`. Raises what it raises, or TimeoutError."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            future.result(deadline_s)
        except TimeoutError:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Let `work` go on."""
        self._tasks.add(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """End everything."""

        async def cancel() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        with suppress(TimeoutError):
            self.run(cancel(), FAREWELL_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(FAREWELL_S)
        if not self._thread.is_alive():
            self._loop.close()


def _proof(key: str | None, who: str, about: str) -> str:
    return hmac.new((key or "").encode(), f"evenkeel heartbeat {who} {about}".encode(), hashlib.sha256).hexdigest()


def _is_shown(answer: dict[str, Any], proof: str) -> bool:
    """Whether the answer holds the proof. As bytes, since compare_digest raises TypeError for text beyond ASCII."""
    return hmac.compare_digest(str(answer.get("proof")).encode(errors="replace"), proof.encode())


def _why(error: Exception) -> str:
    return f"silent for {DEAD_S:g} s" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
