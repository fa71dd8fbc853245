"""Where the first host of a role that spans several listens, for the others: a small file in the run directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from launch.roles.base import finished_looks
from launch.run.waiting import Stop, wait_for
from pipeline.data.checksums import read_sealed_json, write_sealed_json
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import DeadlineExceededError, LayoutError, StoreError

T = TypeVar("T")


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
            return cls(**read_sealed_json(path, remedy, is_replaced=True))
        except OSError:
            return None
        except TypeError as error:
            raise StoreError(f"{path} is damaged ({error}); {remedy}") from error


def await_node_0(
    run: RunDirectory,
    path: Path,
    nodes: int,
    *,
    is_alive: Callable[[Rendezvous], bool],
    join: Callable[[Rendezvous], T | None],
    role: str,
    stop: Stop,
    deadline_s: float,
) -> T | Literal["finished"]:
    """What `join` makes of the file at `path`, once that is of a start that `is_alive`; where it makes None of it, the
    file is read again. Or that the run is finished: node 0 has then ended without asking for anybody.

    Raises LayoutError when node 0 has named another number of `nodes` until the deadline, StoreError for a damaged
    file, and as `wait_for` does.
    """
    look_for_end = finished_looks()
    other: list[int] = []
    """--nodes of the last file that does not fit. It may be of a start that is gone: the next one may fit."""

    def joined() -> T | Literal["finished"] | None:
        other.clear()
        if look_for_end() and run.is_finished():
            return "finished"
        found = Rendezvous.read(path)
        if found is None or not is_alive(found):
            return None
        if found.nodes != nodes:
            other.append(found.nodes)
            return None
        return join(found)

    try:
        return wait_for(stop, joined, f"node 0 of {role} (named in {path})", deadline_s)
    except DeadlineExceededError:
        if other:
            raise LayoutError(f"node 0 has --nodes {other[-1]}, this one {nodes}; give all the same number") from None
        raise
