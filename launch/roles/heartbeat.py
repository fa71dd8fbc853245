"""Exchange heartbeats between the learner's agents, one on each host, and tell how the learner ends.

    node 0          Peers   listens; a peer that is silent for DEAD_S seconds is gone, whatever TCP says
    node 1, 2, …    Peer    connects; finds node 0 gone in the same way

Both sides send a line of JSON a second. First each proves that it knows the API key, by an HMAC over the other side's
nonce, and that both mean the same epoch and node.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from precision.text import parse_object

BEAT_S = 1.0
DEAD_S = 10.0
HANDSHAKE_S = 5.0
MOST_BYTES = 65_536
"""Longest message."""
_POLL_S = 0.1


@dataclass(frozen=True)
class Ending:
    """An exit status of the learner, and the reason."""

    status: int
    reason: str = ""


class Side:
    """A side's knowledge of the others; any thread may read it."""

    lost: str | None = None
    """Name of a node that is gone, and the evidence."""
    ending: Ending | None = None
    """Ending of the learner, from node 0; on node 0, of the first node to fail."""
    stop_asked = False
    """Whether another node was asked to end, so that node 0 ends the ranks of all nodes."""

    def trouble(self) -> Ending | None:
        """Return an Ending if another node has ended or is gone, so that this node's ranks must end; else None."""
        return self.ending or (None if self.lost is None else Ending(1, self.lost))

    def wait_for_trouble(self, deadline_s: float) -> Ending | None:
        """Return another node's Ending, which may be why this node's ranks ended; None after `deadline_s`."""
        ends = time.monotonic() + deadline_s
        while (found := self.trouble()) is None and time.monotonic() < ends:
            time.sleep(_POLL_S)
        return found


class Peers(Side):
    """Node 0's side, as a context manager."""

    def __init__(self, address: str, port: int, *, nodes: int, epoch: int, key: str | None) -> None:
        """Listen at once. Raises OSError when the port is taken."""
        self.joined: dict[int, _Line] = {}
        """Connection of each other node that has joined."""
        self._nodes, self._epoch, self._key = nodes, epoch, key
        self._started = self._closed = False
        self._lock = threading.Lock()
        """Held while nodes join and leave, and while the ranks are started."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, port), family=family)
        threading.Thread(target=self._accept, name="peers", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # ends the wait in accept, as closing alone does not
        self._server.close()
        for line in list(self.joined.values()):
            line.close()

    def start_ranks(self) -> None:
        """Tell all nodes to start ranks; then none may join or leave. A node that has just left counts as lost."""
        with self._lock:
            self._started = True
            if len(self.joined) < self._nodes - 1:
                self.lost = self.lost or "a node left before the ranks were started"
                return
        self.tell(go=True)

    def tell(self, **message: Any) -> None:
        """Send a message to all nodes; a node that misses it notices that node 0 is gone."""
        for line in list(self.joined.values()):
            with suppress(OSError):
                line.send(**message)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._server.accept()
            except OSError:
                time.sleep(_POLL_S)
                continue
            threading.Thread(target=self._serve, args=(_Line(connection),), name="peer", daemon=True).start()

    def _serve(self, line: _Line) -> None:
        give_up = threading.Timer(HANDSHAKE_S, line.close)
        give_up.start()
        try:
            hello = line.read()
            node, theirs, ours = int(hello["node"]), str(hello["nonce"]), secrets.token_hex(16)
            about = f"{self._epoch} {node} {theirs} {ours}"
            line.send(nonce=ours, proof=_proof(self._key, "node 0", about))
            if not _shows(line.read(), _proof(self._key, "peer", about)) or not 0 < node < self._nodes:
                raise ValueError("wrong key, or no such node")
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            line.close()
            return
        finally:
            give_up.cancel()
        with self._lock:
            if late := self._started:
                self.lost = self.lost or f"node {node} was started again"
            else:
                self.joined[node] = line
        if late:  # the node then waits for the next start, and closes
            line.exchange(lambda _: None, status=1, reason=self.lost)
            return
        why = line.exchange(lambda message: self._take(node, message))
        with self._lock:
            if self.joined.get(node) is line:  # the node has not joined again
                del self.joined[node]
                if self._started:
                    self.lost = self.lost or f"node {node} is gone ({why})"

    def _take(self, node: int, message: dict[str, Any]) -> None:
        self.stop_asked = self.stop_asked or bool(message.get("stop"))
        if "status" in message:
            self.ending = self.ending or Ending(message["status"], f"node {node}: {message.get('reason', '')}")


class Peer(Side):
    """The side of node 1, 2, …, as a context manager."""

    def __init__(self, host: str, port: int, *, node: int, epoch: int, key: str | None) -> None:
        """Connect. Raises OSError, EOFError or ValueError when node 0 is not there, or of another epoch."""
        self.go = False
        """Whether node 0 has all nodes, so that ranks start."""
        self._line = _Line(socket.create_connection((host, port), HANDSHAKE_S))
        try:
            ours = secrets.token_hex(16)
            self._line.send(node=node, nonce=ours)
            answer = self._line.read()
            about = f"{epoch} {node} {ours} {answer.get('nonce')}"
            if not _shows(answer, _proof(key, "node 0", about)):
                raise ValueError("it has another API key, or is of another start")
            self._line.send(proof=_proof(key, "peer", about))
        except BaseException:
            self._line.close()
            raise
        threading.Thread(target=self._listen, name="peer", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def tell(self, **message: Any) -> None:
        """Send node 0 an Ending's fields, or `stop` if this node was asked to end: all ranks save then, and end."""
        with suppress(OSError):  # node 0 notices that this node is gone
            self._line.send(**message)

    def _listen(self) -> None:
        self.lost = f"node 0 is gone ({self._line.exchange(self._take)})"

    def _take(self, message: dict[str, Any]) -> None:
        self.go = self.go or bool(message.get("go"))
        if "status" in message:
            self.ending = Ending(message["status"], str(message.get("reason", "")))


class _Line:
    """A connection for messages, safe for several threads."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(HANDSHAKE_S)
        self._socket, self._file = connection, connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send a message. Raises OSError."""
        with self._sending:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> dict[str, Any]:
        """Return the next message. Raises OSError, EOFError at the end, and ValueError for an invalid message."""
        text = self._file.readline(MOST_BYTES)
        if len(text) == MOST_BYTES:
            raise ValueError(f"a message has {MOST_BYTES} bytes or more")
        if not text.endswith(b"\n"):
            raise EOFError("the connection was closed")
        message = parse_object(text)
        if type(message.get("status", 0)) is not int:
            raise ValueError("its status is no number")
        return message

    def exchange(self, take: Callable[[dict[str, Any]], None], **first: Any) -> str:
        """Send `first`, then a message a second, and pass received messages to `take`, until the connection ends or the
        other side is silent for DEAD_S seconds. Returns why it ended."""
        self._socket.settimeout(DEAD_S)
        threading.Thread(target=self._beat, args=(first,), name="beat", daemon=True).start()
        try:
            while True:
                take(self.read())
        except TimeoutError:
            return f"silent for {DEAD_S:g} s"
        except (OSError, ValueError, EOFError) as error:
            return str(error) or type(error).__name__
        finally:
            self.close()

    def _beat(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the reader notices
            while True:
                self.send(**message)
                message = {}
                time.sleep(BEAT_S)

    def close(self) -> None:
        """Close the connection, even again or while another thread reads."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _proof(key: str | None, who: str, about: str) -> str:
    return hmac.new((key or "").encode(), f"evenkeel heartbeat {who} {about}".encode(), hashlib.sha256).hexdigest()


def _shows(answer: dict[str, Any], proof: str) -> bool:
    """Return whether the answer holds the proof. compare_digest takes bytes, since it refuses text beyond ASCII."""
    return hmac.compare_digest(str(answer.get("proof")).encode(errors="replace"), proof.encode())
