"""Messages between the run, a worker and what a worker starts, which do not trust each other.

    a length of four bytes, then JSON      every wait has a deadline, also for the second half of a message
    request   KEY [[prompt, response, answer, metadata, info], …]
    judgment  [KEY, [reward, parts, failed, detail], …]

Whatever the bytes are, reading them gives a Judgment or raises BadMessageError, and costs no more than the limit on
their number. multiprocessing.connection would block in the midst of a message that does not go on.
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
    """The other side has ended."""


class ChannelTimeoutError(Exception):
    """The deadline passed."""


class BadMessageError(Exception):
    """What came is no message that was expected."""


class Channel:
    """One end of a socket, which it owns and makes non-blocking."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._received = bytearray()
        os.set_blocking(descriptor, False)

    def send(self, message: bytes, deadline_s: float) -> None:
        """Raises ChannelClosedError or ChannelTimeoutError."""
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
        """Return the next message. While there is none, `meanwhile` is called every so often; what it raises ends the
        wait.

        Raises ChannelClosedError, ChannelTimeoutError, and BadMessageError for a message longer than `most_bytes`.
        """
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
        """Whether there is something to read: part of a message, or the end."""
        return bool(self._received) or self.poll(select.POLLIN, 0.0)

    def close(self) -> None:
        """Close the socket."""
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
        """Return whether the event has come, such as select.POLLRDHUP: the other side has ended."""
        poll = select.poll()
        poll.register(self._descriptor, event)
        return bool(poll.poll(wait_s * 1000))


MAX_TEXTS_BYTES = 64 * 2**20
"""Of one request's texts and metadata."""
MAX_JUDGMENT_BYTES = 4 * 2**20
"""Of one request's judgments."""
_MAX_DETAIL, MAX_PARTS, MAX_NAME = 500, 64, 64
KEY_CHARACTERS = 32
"""Of the name of one request, in hex, which nobody could know before."""
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_SHORTEST_SECRET = 8
_GIVEN = ("prompt", "response", "answer", "metadata", "info")
MAX_REQUEST_BYTES = MAX_TEXTS_BYTES + KEY_CHARACTERS
READY = "ready"
"""The key of the first message, which says whether the reward function was imported."""
START_DEADLINE_S = 120.0
"""Longest wait for a process to start Python and import the reward function, on a busy machine."""

FAILURES = (
    *("timeout", "crashed", "raised", "non_finite", "bad_result", "too_large"),
    *("memory", "processes", "files"),
)
"""Why there is no score. memory, processes, files: above a limit of the sandbox."""


class Judgment(NamedTuple):
    """`failed` is one of FAILURES, with `detail` for the log, or None."""

    reward: float
    parts: dict[str, float]
    failed: str | None = None
    detail: str = ""
    rest: tuple[Judgment, ...] = ()
    """On the other samples of the same request. None, where there are several: it is the judgment on each."""

    def of_each(self, count: int) -> list[Judgment]:
        """On each of `count` samples of the request."""
        alone = self._replace(rest=())
        if len(self.rest) == count - 1:
            return [alone, *self.rest]
        if self.failed is None:
            alone = failure("bad_result", f"{1 + len(self.rest)} judgments came, expected {count}")
        return [alone] * count


def together(judgments: Sequence[Judgment]) -> Judgment:
    """Of the samples of a request, one at least."""
    return judgments[0]._replace(rest=tuple(judgments[1:]))


def failure(reason: str, detail: str) -> Judgment:
    """No score, and why, on one line without secrets: it goes into logs."""
    return Judgment(0.0, {}, reason, one_line(without_secrets(detail), _MAX_DETAIL))


def without_secrets(text: str) -> str:
    """Keys and passwords of the environment by their variables' names: errors of HTTP clients name the address with its
    query. The longest go first, since one may be the beginning of another."""
    hidden = [(value.strip(), name) for name, value in os.environ.items() if _SECRET.search(name)]
    for value, name in sorted(hidden, key=lambda pair: len(pair[0]), reverse=True):
        if len(value) >= _SHORTEST_SECRET:
            text = without(text, value, f"${name}")
    return text


def encode_samples(samples: Iterable[tuple[str, str, str, Mapping[str, Any], Mapping[str, Any]]]) -> list[bytes]:
    """Write what there is to judge of each sample: prompt, response, answer, metadata and info, the last two plain
    data. Lone surrogates too."""
    return [json.dumps([*texts, dict(metadata), dict(info)]).encode() for *texts, metadata, info in samples]


def decode_texts(message: bytes) -> list[dict[str, Any]]:
    """Of each sample of a request its prompt, response, answer, metadata and info. A batched function's request is the
    group of its samples."""
    samples = [dict(zip(_GIVEN, sample, strict=True)) for sample in json.loads(message)]
    for sample in samples:
        if sample["info"]:
            sample["info"].setdefault("group", [one["response"] for one in samples])
    return samples


def encode_judgment(key: str, judgment: Judgment) -> bytes:
    """The message that answers the request `key`."""
    return json.dumps([key, *([*one[:3], one.detail[:_MAX_DETAIL]] for one in (judgment, *judgment.rest))]).encode()


def decode_judgment(key: str, message: bytes) -> Judgment:
    """What answers the request `key`. Raises BadMessageError for anything else: another request's key, another shape,
    numbers that are not finite."""
    try:
        fields = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise BadMessageError(f"no JSON ({type(error).__name__})") from None
    if not isinstance(fields, list) or len(fields) < 2:
        raise BadMessageError("no list of a key and judgments")
    if fields[0] != key:
        raise BadMessageError("it does not answer what was asked")
    judgments = []
    for one in fields[1:]:
        if not isinstance(one, list) or len(one) != 4:
            raise BadMessageError("no list of four")
        reward, parts, failed, detail = one
        if not _is_number(reward) or not isinstance(parts, dict) or len(parts) > MAX_PARTS:
            raise BadMessageError("reward or parts are none")
        if not all(len(name) <= MAX_NAME and _is_number(part) for name, part in parts.items()):
            raise BadMessageError("a part is none")
        if not (failed is None or failed in FAILURES) or not isinstance(detail, str):
            raise BadMessageError("an unknown failure")
        said = detail[:_MAX_DETAIL] if failed is None else one_line(detail, _MAX_DETAIL)  # a path is given on as it is
        judgments.append(Judgment(float(reward), {name: float(part) for name, part in parts.items()}, failed, said))
    return together(judgments)


def _is_number(value: Any) -> bool:
    """A finite one that fits a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 if isinstance(value, int) else math.isfinite(value)
