"""Is a role of the run at work? A repair under it would take files from under its hands."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from pipeline.data.checksums import read_sealed_json
from pipeline.data.files import NUMBER
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RunConflictError, StoreError

_NUMBER = re.compile(rf"(?:{NUMBER})")
_CLOCK_S = 5.0


def refuse_at_work(run: RunDirectory, *, stopped: bool) -> None:
    """Raises RunConflictError while a process of the run lives here, or may live on another host: only the user knows
    that, who then says `stopped`."""
    for name, claimed in _newest_starts(run.path / "epochs"):
        here = claimed.get("host") == socket.gethostname()
        who = f"{name} (process {claimed.get('pid')} on {claimed.get('host')})"
        if here and _lives(claimed):
            raise RunConflictError(f"{run.path} is at work: {who}; stop it first, then repair the run")
        if not here and not stopped:
            raise RunConflictError(
                f"whether {who} has ended cannot be seen from here; look there, and once it has, say so by --stopped"
            )


def _newest_starts(epochs: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the newest start of each role says of itself; one whose file is damaged says nothing. Supervisors have a
    heartbeat instead (launch.run.claim)."""
    for folder in sorted(set(epochs.glob("*")) - {epochs / "supervisor"}):
        starts = sorted(path for path in folder.glob("*") if _NUMBER.fullmatch(path.name))
        if not starts:
            continue
        try:
            yield folder.name, read_sealed_json(starts[-1], "")
        except StoreError:
            yield folder.name, dict(host="an unknown host", pid="?")


def _lives(claimed: dict[str, Any]) -> bool:
    try:
        return psutil.Process(int(claimed["pid"])).create_time() <= float(claimed["time"]) + _CLOCK_S
    except (psutil.NoSuchProcess, KeyError, ValueError):
        return False
