"""Where the first host of a role that spans several listens, for the others: a small file in the run directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pipeline.data.files import write_atomically


@dataclass(frozen=True)
class Rendezvous:
    """RUN/learner.json, or RUN/engines/hosts-000003.json."""

    epoch: int
    """Of node 0, which made it; a later start has another one."""
    host: str
    port: int
    nodes: int

    def write(self, path: Path) -> None:
        """Replaces what an earlier start has written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(vars(self)) + "\n")

    @classmethod
    def read(cls, path: Path) -> Rendezvous | None:
        """None when there is none that can be read now."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None
