"""Where the first host of a role that spans several listens, for the others: a small file in the run directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.data.integrity.sealed import read_sealed_json, write_sealed_json
from pipeline.errors import LayoutError, StoreError


@dataclass(frozen=True)
class Rendezvous:
    """RUN/learner.json, or RUN/engines/hosts-000003.json."""

    epoch: int
    """Of node 0, which made it; a later start has another one."""
    host: str
    port: int
    nodes: int
    version: int | None = None
    """Of the weights that an engine starts with, which node 0 holds for all hosts; None for a learner."""

    def write(self, path: Path) -> None:
        """Replaces what an earlier start has written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed_json(path, vars(self))

    @classmethod
    def read(cls, path: Path) -> Rendezvous | None:
        """None when there is none that can be read now. Raises StoreError when it is damaged."""
        remedy = "remove it, and start node 0 again"
        try:
            return cls(**read_sealed_json(path, remedy))
        except OSError:
            return None
        except TypeError as error:
            raise StoreError(f"{path} is damaged ({error}); {remedy}") from error


def raise_other_nodes(nodes: int, found: Sequence[int]) -> None:
    """Raises LayoutError when node 0 named another number of hosts for as long as it was waited for."""
    if found:
        raise LayoutError(f"node 0 has --nodes {found[-1]}, this one {nodes}; give all the same number")
