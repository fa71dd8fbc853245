"""An agent of `evenkeel doctor --hosts` on another host, started by what the user starts programs there with."""

from __future__ import annotations

import json
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from pipeline.child_process import kill_and_wait
from pipeline.errors import EvenKeelError
from precision.text import JsonError, parse_object

ANSWER_S = 60.0
"""Longest wait for an answer to what takes no time by itself: a program on another host may start slowly."""
_STOP_S = 5.0
_MOST_CHARACTERS = 1 << 20
"""Of a line; what is longer counts as several."""
AGENT = "launch.doctor.agent"
DEFAULT_VIA = "ssh {host}"


class HostError(EvenKeelError):
    """A host cannot be asked, or an order failed there."""


@dataclass(frozen=True)
class Host:
    """One of `--hosts`."""

    name: str
    """Where a program is started, for --via."""
    address: str
    """How other hosts reach it."""

    @classmethod
    def parse(cls, text: str) -> Host:
        """`NAME` or `NAME=ADDRESS`."""
        name, _, address = text.strip().partition("=")
        if not name:
            raise HostError(f"--hosts has {text!r}, expected NAME or NAME=ADDRESS; write for example --hosts a,b")
        return cls(name, address or name)


def words_of(via: str, host: str) -> list[str]:
    """The command that --via gives for a host. Raises HostError."""
    try:
        return [word.format(host=host) for word in shlex.split(via)]
    except (ValueError, LookupError, AttributeError):
        raise HostError(
            f"--via is {via!r}, expected a command with {{host}} in it, such as {DEFAULT_VIA!r}; close every quote, "
            "and write other braces twice"
        ) from None


class Agent:
    """A running agent; a context manager. One thread at a time may use it."""

    def __init__(self, host: Host, via: str, program: Sequence[str] = ()) -> None:
        """`program` is the command of the agent there: by default this Python, at the same path."""
        self.host = host
        self._command = [*words_of(via, host.name), *(program or (sys.executable, "-P", "-m", AGENT))]
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise HostError(f"{shlex.join(self._command)} cannot be started ({error.strerror}); see --via") from None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._complaints: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_complaints, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the agent: its input is closed, and a program that goes on is killed."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            kill_and_wait(self._process)
        for reader, stream in zip(self._readers, (self._process.stdout, self._process.stderr), strict=True):
            reader.join(_STOP_S)
            assert stream is not None
            if not reader.is_alive():  # otherwise it is in the midst of a read, for which `close` would wait
                stream.close()

    def ask(self, do: str, *, deadline_s: float = ANSWER_S, **order: Any) -> dict[str, Any]:
        """The one answer to an order. Raises HostError."""
        [answer] = self.answers(do, deadline_s=deadline_s, **order)
        return answer

    def answers(self, do: str, *, deadline_s: float = ANSWER_S, **order: Any) -> Iterator[dict[str, Any]]:
        """Each answer, when it comes, to the last one; raises HostError when none comes for `deadline_s`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dict(do=do, **order)) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        done = False
        while not done:
            answer = self._receive(do, deadline_s)
            done = bool(answer.pop("done", False))
            if error := answer.pop("error", None):
                raise HostError(f"host {self.host.name}: {do}: {error}")
            if answer or done:
                yield answer

    def _receive(self, do: str, deadline_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=deadline_s)
        except queue.Empty:
            raise HostError(
                f"host {self.host.name} did not answer `{do}` within {deadline_s:g} s; try by hand: "
                f"{shlex.join(self._command)}"
            ) from None
        if line is None:
            raise self._ended()
        try:
            return parse_object(line)
        except JsonError:
            return {}  # a greeting of the shell there

    def _ended(self) -> HostError:
        for reader in self._readers:
            reader.join(_STOP_S)
        said = " | ".join(self._complaints[-3:]) or "it said nothing"
        return HostError(
            f"the agent on host {self.host.name} ended ({said}); it was started by: {shlex.join(self._command)}; give "
            "another --via, or --python where Even Keel is installed there"
        )

    def _read(self) -> None:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(_MOST_CHARACTERS):
            self._lines.put(line)
        self._lines.put(None)

    def _read_complaints(self) -> None:
        assert self._process.stderr is not None
        while line := self._process.stderr.readline(_MOST_CHARACTERS):
            if line.strip():
                self._complaints.append(line.strip())
