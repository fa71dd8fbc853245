"""Messages between processes that do not trust each other: a length of four bytes, then the message.

Every wait has a deadline, and every length is compared with a limit before anything of that size is read.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

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
    """One side. It owns its descriptors, which it makes non-blocking; both may be the same one."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._received = bytearray()
        self._readable, self._writable, self._closed = select.poll(), select.poll(), select.poll()
        self._readable.register(reading, select.POLLIN)
        self._writable.register(writing, select.POLLOUT)
        self._closed.register(reading, select.POLLRDHUP)
        for descriptor in {reading, writing}:
            os.set_blocking(descriptor, False)

    def send(self, message: bytes, deadline_s: float) -> None:
        """Raises ChannelClosedError or ChannelTimeoutError."""
        rest, give_up = memoryview(len(message).to_bytes(_HEADER_BYTES, "big") + message), time.monotonic() + deadline_s
        while rest:
            try:
                rest = rest[os.write(self._writing, rest) :]
            except BlockingIOError:
                self._wait(self._writable, give_up)
            except OSError as error:
                raise ChannelClosedError from error

    def receive(
        self,
        most_bytes: int,
        deadline_s: float,
        meanwhile: Callable[[], None] | None = None,
        every_s: float = _LONGEST_POLL_S,
    ) -> bytes:
        """The next message. While there is none, `meanwhile` is called every so often; what it raises ends the wait.

        Raises ChannelClosedError, ChannelTimeoutError, and BadMessageError for a message longer than `most_bytes`.
        """
        give_up = time.monotonic() + deadline_s
        while (message := self._taken(most_bytes)) is None:
            self._wait(self._readable, give_up, meanwhile, every_s)
            self._read()
        return message

    @property
    def pending(self) -> bool:
        """Whether there is something to read: part of a message, or the end."""
        return bool(self._received) or bool(self._readable.poll(0))

    @property
    def is_closed(self) -> bool:
        """Whether the other side has ended; what it sent before may be unread."""
        return bool(self._closed.poll(0))

    def close(self) -> None:
        for descriptor in {self._reading, self._writing}:
            os.close(descriptor)

    def _taken(self, most_bytes: int) -> bytes | None:
        """The first message of what has been read, if it is whole."""
        if len(self._received) < _HEADER_BYTES:
            return None
        length = int.from_bytes(self._received[:_HEADER_BYTES], "big")
        if length > most_bytes:
            raise BadMessageError(f"a message of {length} bytes, expected at most {most_bytes}")
        end = _HEADER_BYTES + length
        if len(self._received) < end:
            return None
        message = bytes(self._received[_HEADER_BYTES:end])
        del self._received[:end]
        return message

    def _read(self) -> None:
        try:
            piece = os.read(self._reading, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosedError from error
        if not piece:
            raise ChannelClosedError
        self._received += piece

    def _wait(
        self,
        poll: select.poll,
        give_up: float,
        meanwhile: Callable[[], None] | None = None,
        every_s: float = _LONGEST_POLL_S,
    ) -> None:
        while not poll.poll(max(0.0, min(every_s, give_up - time.monotonic())) * 1000):
            if meanwhile is not None:
                meanwhile()
            if time.monotonic() >= give_up:
                raise ChannelTimeoutError
