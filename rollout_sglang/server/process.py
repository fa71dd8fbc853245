"""A server process: started, waited for, stopped."""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from pipeline.child_process import ChildProcess, ending, first_error, last_lines, remove_scratch
from pipeline.errors import EngineStartError, PortInUseError
from precision.text import without

LOG_LINES = 12
"""Last lines of the log that an EngineStartError carries, where no line of it says what went wrong."""
ERROR_NAMED = "the first error in "
"""Before the log of a server in a message that quotes from it why the server ended."""
FREE_PORTS = range(20_000, 32_768)
_POLL_S = 0.2


class ServerProcess(ChildProcess):
    """A running server. Its session is its own: Ctrl-C reaches the supervisor only, which then stops its servers in
    order."""

    grace_s = 1.0  # SGLang looks at SIGTERM once in five seconds, and an engine has nothing to save: most are killed
    when_parent_dies = signal.SIGKILL

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path | None,
        ready_url: str,
        secret: str | None,
        scratch: Path | None = None,
    ) -> None:
        """Start `command`. `ready_url` answers 2xx once the server can be used; `secret` is kept out of error
        messages; `scratch` is a folder (pipeline.child_process) that is removed with the server."""
        self._scratch = scratch
        super().__init__(command, log, environment, own_session=True)
        self._ready_url = ready_url
        self._secret = secret

    def stop(self) -> None:
        """See ChildProcess."""
        super().stop()
        self._clean()

    def kill(self) -> None:
        """See ChildProcess."""
        super().kill()
        self._clean()

    def _clean(self) -> None:
        if self._scratch is not None:
            remove_scratch(self._scratch)

    def wait_ready(self, deadline_s: float) -> float:
        """Wait until the server answers; returns the seconds. Raises EngineStartError with the end of the log when
        it ended before, or was stopped because it took too long."""
        started = time.monotonic()
        with httpx.Client(timeout=2.0, trust_env=False, verify=False) as http:
            while not self._answers(http):
                status = self.poll()
                if status is not None:
                    raise EngineStartError(f"server {self.how_it_ended()} before it was up; {self.why()}")
                if time.monotonic() - started > deadline_s:
                    self.stop()
                    raise EngineStartError(f"server was not up within {deadline_s:g} s, stopped; {self.why()}")
                time.sleep(_POLL_S)
        return time.monotonic() - started

    def is_ready(self) -> bool:
        """Whether the server answers now."""
        with httpx.Client(timeout=2.0, trust_env=False, verify=False) as http:
            return self._answers(http)

    def how_it_ended(self) -> str:
        """ "ended with status 3" or "was killed by signal 9 (SIGKILL)"."""
        said = ending(self.poll() or 0)
        return said if said.startswith("ended") else f"was {said}"

    def why(self) -> str:
        """The first error in its log since this start, or else the last lines, on one line and without the key."""
        if self.log is None:
            return "see its output"
        said = self.said()
        error = first_error(said)
        text = f"{ERROR_NAMED}{self.log}: {error}" if error else f"{self.log} ends: {last_lines(said, LOG_LINES)}"
        return without(text, self._secret) if self._secret else text

    def _answers(self, http: httpx.Client) -> bool:
        try:
            with http.stream("GET", self._ready_url) as answer:  # its body is not read, however long it is
                return answer.is_success
        except httpx.TransportError:
            return False


def free_ports(count: int) -> list[int]:
    """Different ports of loopback that are free now. Raises PortInUseError.

    Servers take them seconds later. The kernel hands ports from 32768 on (Linux) or 49152 on (macOS) to connections
    that go out, so one of those could be gone by then; these are below.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(FREE_PORTS, 100 + count):
        if len(found) == count:
            break
        with suppress(PortInUseError):
            check_port_free(port)
            found.append(port)
    if len(found) < count:
        raise PortInUseError(
            f"{100 + count} ports of {FREE_PORTS.start} to {FREE_PORTS.stop - 1} were tried, {len(found)} are free, "
            f"{count} are needed; set rollout.port"
        )
    return found


def free_port() -> int:
    """One of `free_ports`."""
    return free_ports(1)[0]


def check_port_free(port: int, address: str = "127.0.0.1") -> None:
    """Raises PortInUseError when something listens on the port of an address of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise PortInUseError(
                f"port {port} is taken ({error.strerror}); stop what listens there, or set rollout.port to another"
            ) from None
