"""A server process: started with its log in a file, waited for, stopped."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from pipeline.errors import EngineStartError, PortInUseError
from rollout_sglang.server.launch_server import PARENT_VARIABLE

STOP_GRACE_S = 1.0
"""SGLang looks at SIGTERM once in five seconds, and an engine has nothing to save: most are killed."""
LOG_LINES = 12
"""Last lines of the log that an EngineStartError carries."""
_POLL_S = 0.2


class ServerProcess:
    """A running server. `ready_url` answers 2xx once it can be used; `secret` is kept out of error messages."""

    def __init__(self, process: subprocess.Popen[bytes], *, log: Path, ready_url: str, secret: str | None) -> None:
        self._process = process
        self._log = log
        self._ready_url = ready_url
        self._secret = secret

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status, None while it runs."""
        return self._process.poll()

    def wait_ready(self, deadline_s: float) -> float:
        """Seconds until the server answered. Raises EngineStartError with the end of the log, the server stopped."""
        started = time.monotonic()
        with httpx.Client(timeout=2.0, trust_env=False, verify=False) as http:
            while not self._is_ready(http):
                status = self._process.poll()
                if status is not None:
                    raise EngineStartError(f"server ended with status {status} before it was up; {self._log_end()}")
                if time.monotonic() - started > deadline_s:
                    self.stop()
                    raise EngineStartError(f"server was not up within {deadline_s:g} s, stopped; {self._log_end()}")
                time.sleep(_POLL_S)
        return time.monotonic() - started

    def stop(self) -> None:
        """Ask it to end, insist after a grace period. Its children die with it."""
        self._process.terminate()
        try:
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def _is_ready(self, http: httpx.Client) -> bool:
        try:
            return http.get(self._ready_url).is_success
        except httpx.TransportError:
            return False

    def _log_end(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        text = " | ".join(line.strip() for line in lines if line.strip())
        return f"{self._log} ends: {text.replace(self._secret, '***') if self._secret else text}"


def launch(
    argv: Sequence[str], *, environment: Mapping[str, str], log: Path, ready_url: str, secret: str | None
) -> ServerProcess:
    """Start `argv`, its output appended to `log`, which only this user can read.

    Our server modules die with the calling thread. The session is its own: Ctrl-C reaches the supervisor only, which
    then stops its servers in order.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            env=dict(environment) | {PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
    return ServerProcess(process, log=log, ready_url=ready_url, secret=secret)


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port_free(port: int) -> None:
    """Raises PortInUseError when something listens on the port of loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PortInUseError(
                f"port {port} is taken ({error.strerror}); stop what listens there, or set rollout.port to another"
            ) from None
