"""Exchange messages between the run, a worker and the worker's children, which do not trust each other.

    framing   a length of four bytes, then JSON; every wait has a deadline, also in the middle of a message
    request   KEY [[prompt, response, answer, metadata, info], …]
    judgment  [KEY, [reward, parts, failed, detail], …]

Any received bytes give a Judgment or raise BadMessageError, at a cost bounded by the limit on their number.
multiprocessing.connection would block in the middle of an incomplete message.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from precision.text import one_line, without

_HEADER_BYTES = 4
_READ_BYTES = 1 << 16
_LONGEST_POLL_S = 3600.0


class ChannelClosedError(Exception):
    """The other end is closed."""


class ChannelTimeoutError(Exception):
    """A deadline passed."""


class BadMessageError(Exception):
    """A received message is invalid."""


class Channel:
    """One end of a socket, which the channel owns and makes non-blocking."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._received = bytearray()
        os.set_blocking(descriptor, False)

    def send(self, message: bytes, deadline_s: float) -> None:
        """Send a message. Raises ChannelClosedError or ChannelTimeoutError."""
        rest, give_up = memoryview(len(message).to_bytes(_HEADER_BYTES, "big") + message), time.monotonic() + deadline_s
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, give_up)
            except OSError as error:
                raise ChannelClosedError from error

    def receive(
        self,
        most_bytes: int,
        deadline_s: float,
        meanwhile: Callable[[], None] | None = None,
        every_s: float = _LONGEST_POLL_S,
    ) -> bytes:
        """Return the next message. Until then call `meanwhile` every `every_s` seconds; its exceptions end the wait.
        Raises ChannelClosedError, ChannelTimeoutError, and BadMessageError for a longer message than `most_bytes`."""
        give_up, received = time.monotonic() + deadline_s, self._received
        while True:
            if len(received) >= _HEADER_BYTES:
                length = int.from_bytes(received[:_HEADER_BYTES], "big")
                if length > most_bytes:
                    raise BadMessageError(f"a message of {length} bytes, expected at most {most_bytes}")
                end = _HEADER_BYTES + length
                if len(received) >= end:
                    message = bytes(received[_HEADER_BYTES:end])
                    del received[:end]
                    return message
            self._wait(select.POLLIN, give_up, meanwhile, every_s)
            try:
                piece = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                raise ChannelClosedError from error
            if not piece:
                raise ChannelClosedError
            received += piece

    @property
    def pending(self) -> bool:
        """Whether part of a message, or the end of the stream, can be read."""
        return bool(self._received) or self.poll(select.POLLIN, 0.0)

    def close(self) -> None:
        os.close(self._descriptor)

    def _wait(
        self,
        event: int,
        give_up: float,
        meanwhile: Callable[[], None] | None = None,
        every_s: float = _LONGEST_POLL_S,
    ) -> None:
        while not self.poll(event, max(0.0, min(every_s, give_up - time.monotonic()))):
            if meanwhile is not None:
                meanwhile()
            if time.monotonic() >= give_up:
                raise ChannelTimeoutError

    def poll(self, event: int, wait_s: float) -> bool:
        """Return whether the event occurs in time, such as select.POLLRDHUP when the other end is closed."""
        poll = select.poll()
        poll.register(self._descriptor, event)
        return bool(poll.poll(wait_s * 1000))


MAX_TEXTS_BYTES = 64 * 2**20
"""Largest size of a request's texts and metadata."""
MAX_JUDGMENT_BYTES = 4 * 2**20
"""Largest size of a request's judgments."""
_MAX_DETAIL, MAX_PARTS, MAX_NAME = 500, 64, 64
KEY_CHARACTERS = 32
"""Length of a request's key, in hex digits that nobody can guess."""
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_SHORTEST_SECRET = 8
_GIVEN = ("prompt", "response", "answer", "metadata", "info")
MAX_REQUEST_BYTES = MAX_TEXTS_BYTES + KEY_CHARACTERS
READY = "ready"
"""Key of the first message, which reports whether the reward function was imported."""
START_DEADLINE_S = 120.0
"""Seconds to wait for a process to start Python and import the reward function, on a busy machine."""

FAILURES = (
    *("timeout", "crashed", "raised", "non_finite", "bad_result", "too_large"),
    *("memory", "processes", "files"),
)
"""Reasons for a missing score. memory, processes, files: above a limit of the sandbox."""


class Judgment(NamedTuple):
    """A score, or the reason for its absence: `failed` is one of FAILURES, with `detail` for the log, or None."""

    reward: float
    parts: dict[str, float]
    failed: str | None = None
    detail: str = ""
    rest: tuple[Judgment, ...] = ()
    """Judgments on the other samples of the request. If empty, a failure applies to all of them."""

    def of_each(self, count: int) -> list[Judgment]:
        """Return the judgment on each of `count` samples of the request."""
        alone = self._replace(rest=())
        if len(self.rest) == count - 1:
            return [alone, *self.rest]
        if self.failed is None:
            alone = failure("bad_result", f"{1 + len(self.rest)} judgments came, expected {count}")
        return [alone] * count


def together(judgments: Sequence[Judgment]) -> Judgment:
    """Combine the judgments on a request's samples, at least one."""
    return judgments[0]._replace(rest=tuple(judgments[1:]))


def failure(reason: str, detail: str) -> Judgment:
    """Return a Judgment without a score. Its detail goes into logs, so it is one line without secrets."""
    return Judgment(0.0, {}, reason, one_line(without_secrets(detail), _MAX_DETAIL))


def without_secrets(text: str) -> str:
    """Replace keys and passwords of the environment by their variables' names, since errors of HTTP clients quote whole
    addresses. The longest go first, since one may be the beginning of another."""
    hidden = [(value.strip(), name) for name, value in os.environ.items() if _SECRET.search(name)]
    for value, name in sorted(hidden, key=lambda pair: len(pair[0]), reverse=True):
        if len(value) >= _SHORTEST_SECRET:
            text = without(text, value, f"${name}")
    return text


def encode_samples(samples: Iterable[tuple[str, str, str, Mapping[str, Any], Mapping[str, Any]]]) -> list[bytes]:
    """Encode the prompt, response, answer, metadata and info of each sample. Lone surrogates pass."""
    return [json.dumps([*texts, dict(metadata), dict(info)]).encode() for *texts, metadata, info in samples]


def decode_texts(message: bytes) -> list[dict[str, Any]]:
    """Return prompt, response, answer, metadata and info of each sample of a request, which is one group if batched."""
    samples = [dict(zip(_GIVEN, sample, strict=True)) for sample in json.loads(message)]
    for sample in samples:
        if sample["info"]:
            sample["info"].setdefault("group", [one["response"] for one in samples])
    return samples


def encode_judgment(key: str, judgment: Judgment) -> bytes:
    return json.dumps([key, *([*one[:3], one.detail[:_MAX_DETAIL]] for one in (judgment, *judgment.rest))]).encode()


def decode_judgment(key: str, message: bytes) -> Judgment:
    """Return the judgment that answers the request `key`. Raises BadMessageError for anything else."""
    try:
        fields = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise BadMessageError(f"no JSON ({type(error).__name__})") from None
    if not isinstance(fields, list) or len(fields) < 2:
        raise BadMessageError("no list of a key and judgments")
    if fields[0] != key:
        raise BadMessageError("it answers another request")
    judgments = []
    for one in fields[1:]:
        if not isinstance(one, list) or len(one) != 4:
            raise BadMessageError("no list of four")
        reward, parts, failed, detail = one
        if not is_number(reward) or not isinstance(parts, dict) or len(parts) > MAX_PARTS:
            raise BadMessageError("reward or parts are none")
        if not all(len(name) <= MAX_NAME and is_number(part) for name, part in parts.items()):
            raise BadMessageError("a part is none")
        if not (failed is None or failed in FAILURES) or not isinstance(detail, str):
            raise BadMessageError("an unknown failure")
        said = detail[:_MAX_DETAIL] if failed is None else one_line(detail, _MAX_DETAIL)  # READY's detail is a path
        judgments.append(Judgment(float(reward), {name: float(part) for name, part in parts.items()}, failed, said))
    return together(judgments)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number that fits a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 if isinstance(value, int) else math.isfinite(value)
