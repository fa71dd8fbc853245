"""Choose the sandbox: start a worker on each rung, from the top, and let it try to get out.

bubblewrap    namespaces for processes, network and mounts; reward code may start processes
landlock      no privilege, no namespace: containers that forbid both allow it; reward code starts no process
none          only where the recipe asks for it
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.rewards.messages import encode_samples
from pipeline.rewards.sandbox.confine import Rung, landlock_version
from pipeline.rewards.sandbox.view import MOST_MOUNTS, PROGRAM, Bubblewrap
from pipeline.rewards.worker_process import Sandbox, WorkerProcess

RUNGS: tuple[Rung, ...] = ("bubblewrap", "landlock")
LEAKS = "code in it"
"""Beginning of the reason against a rung that exists and does not hold."""
MOST_MOUNTS_AT_FIRST = 500
"""Limit for a run to begin under bubblewrap. Files come while it is trained, so it goes on with MOST_MOUNTS."""
PROBE = "pipeline.rewards.sandbox.choice:escapes"
_PROBE_DEADLINE_S, _PROBE_MEMORY_MIB = 60.0, 512
_MISSING = {
    "bubblewrap": f"{PROGRAM} is not installed (Debian: apt install bubblewrap)",
    "landlock": "the kernel has no Landlock, or it is not among its active security modules",
}


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run needs of its sandbox: to run `rewards`, and to hide `hidden` and `runs`, the folder that holds the
    run. `began`: the rung that the run began on."""

    rewards: tuple[str, ...] = ()
    hidden: tuple[Path, ...] = ()
    runs: Path | None = None
    began: str | None = None

    def on(self, rung: Rung) -> Sandbox:
        return Sandbox(rung=rung, landlock_abi=landlock_version(), hidden=self.hidden, runs=self.runs)


NOTHING = Needs()


@dataclass(frozen=True, kw_only=True)
class SandboxChoice:
    """The highest rung that holds, None without one, and the reasons against the rungs above it."""

    rung: Rung | None
    refused: Mapping[str, str] = field(default_factory=dict)


def choose(needs: Needs = NOTHING) -> SandboxChoice:
    """Try the rungs from the top, some seconds each, and return the first that holds."""
    refused: dict[str, str] = {}
    for rung in RUNGS:
        problem = what_is_wrong_with(rung, needs)
        if problem is None:
            return SandboxChoice(rung=rung, refused=refused)
        refused[rung] = problem
    return SandboxChoice(rung=None, refused=refused)


def what_is_wrong_with(rung: Rung, needs: Needs = NOTHING) -> str | None:
    """Return why a rung cannot be used; None if it shows what the run's rewards need and withstands the probe."""
    present = shutil.which(PROGRAM) if rung == "bubblewrap" else landlock_version()
    if not present:
        return _MISSING[rung]
    if rung == "bubblewrap":
        most = MOST_MOUNTS if needs.began == rung else MOST_MOUNTS_AT_FIRST
        for reward in needs.rewards:
            try:
                Bubblewrap(needs.on(rung).view(reward), most)
            except OSError as error:
                return error.strerror
    with tempfile.TemporaryDirectory(prefix="evenkeel-probe-") as folder:
        hidden = Path(folder).resolve() / "hidden"
        hidden.write_text("not to be read", encoding="utf-8")
        sandbox = replace(needs, hidden=(*needs.hidden, hidden.parent)).on(rung)
        with subprocess.Popen([sys.executable, "-ISc", "input()"], stdin=subprocess.PIPE) as target:
            worker = WorkerProcess(PROBE, _PROBE_DEADLINE_S, _PROBE_MEMORY_MIB, sandbox)
            try:
                if (problem := worker.start()) is not None:
                    return f"it cannot be started here: {problem}"
                worker.post(*encode_samples([(os.fspath(hidden), str(target.pid), "", {}, {})]))
                judgment = worker.collect()
            finally:
                worker.end()
                worker.release()
                target.kill()
    if judgment.failed is not None:
        return f"its probe failed ({judgment.failed}): {judgment.detail}"
    escaped = [name for name, succeeded in judgment.parts.items() if succeeded]
    return f"{LEAKS} {', '.join(escaped)}" if escaped else None


def escapes(prompt: str, response: str, answer: str) -> tuple[float, dict[str, float]]:  # noqa: ARG001
    """Try to get out of the sandbox. The prompt names a hidden file, the response a process of the same user. Parts are
    1 for attempts that succeeded."""
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
    parts = dict.fromkeys(attempts, 1.0)
    for name, attempt in attempts.items():
        try:
            attempt()
        except OSError:
            parts[name] = 0.0
    parts["sees the API key"] = float("EVENKEEL_API_KEY" in os.environ)
    return sum(parts.values()), parts
