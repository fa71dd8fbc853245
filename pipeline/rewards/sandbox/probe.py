"""A reward function that tries to get out: what a rung is asked before it is trusted with a run."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

NAME = "pipeline.rewards.sandbox.probe:escapes"


def escapes(prompt: str, response: str, answer: str) -> tuple[float, dict[str, float]]:  # noqa: ARG001
    """The prompt names a hidden file, the response a process of the same user. Parts: which attempt succeeded (1)."""
    hidden, process = Path(prompt), int(response)
    attempts: dict[str, Callable[[], object]] = {
        "reads a hidden file": hidden.read_bytes,
        "writes beside it": lambda: hidden.with_name("written").touch(),
        "changes its mode": lambda: hidden.chmod(0o600),
        "shortens it": lambda: os.close(os.open(hidden, os.O_ACCMODE | os.O_TRUNC)),
        "makes a socket": lambda: socket.socket().close(),
        "reads another process": lambda: Path(f"/proc/{process}/environ").read_bytes(),
        "signals another process": lambda: os.kill(process, signal.SIGCONT),
        "writes to the system": lambda: Path("/usr/evenkeel-probe").touch(),
    }
    parts = {name: float(_succeeds(attempt)) for name, attempt in attempts.items()}
    parts["sees the API key"] = float("EVENKEEL_API_KEY" in os.environ)
    return sum(parts.values()), parts


def _succeeds(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True
