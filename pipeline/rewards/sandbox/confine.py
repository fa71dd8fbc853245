"""What a process in the sandbox does to itself, before any code of others runs in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.rewards.sandbox.landlock import LIST, READ, USE_DEVICE, WRITE, restrict
from pipeline.rewards.sandbox.limits import give_up_privileges, limit_this_process
from pipeline.rewards.sandbox.system_calls import refuse_system_calls

Rung = Literal["bubblewrap", "landlock"]

_DEVICES = tuple(Path("/dev") / name for name in ("null", "zero", "full", "random", "urandom"))
_ABOUT_ITSELF = tuple(Path("/proc") / name for name in ("self", "cpuinfo", "meminfo"))


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """How a process is confined. Under bubblewrap the mounts are there already, and `pieces` is not read."""

    rung: Rung
    memory_bytes: int
    scratch: Path
    pieces: tuple[tuple[Path, bool], ...] = ()
    landlock_abi: int = 0

    def enter(self) -> None:
        """Confine this process and all that it starts, for good. Raises OSError where the kernel refuses."""
        limit_this_process(self.memory_bytes)
        give_up_privileges()
        if self.rung == "landlock":
            readable = [(path, READ if whole else LIST) for path, whole in self.pieces]
            readable += [(path, READ) for path in _ABOUT_ITSELF] + [(path, USE_DEVICE) for path in _DEVICES]
            restrict([*readable, (self.scratch, WRITE)], self.landlock_abi)
        refuse_system_calls(os.getpid() if self.rung == "landlock" else None)
