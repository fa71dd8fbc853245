"""What an exporter asks of the tool that it writes for.

Nothing but the destination says what was exported: there is no file beside it that a kill could leave untrue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from launch.export.points import Key, Point


class Destination(ABC):
    """A context manager. It belongs to one run, and to one exporter at a time."""

    def __init__(self, folder: Path) -> None:
        """`folder` is there."""
        self._folder = folder

    @abstractmethod
    def held(self) -> Mapping[Key, float]:
        """The time of each point that it holds whole, to the millisecond; asked once, before anything else."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all points. Killed amidst of it, it may hold any of them."""

    @abstractmethod
    def write(self, point: Point) -> None:
        """Add a point; after a kill it is there whole or not at all."""

    @abstractmethod
    def flush(self) -> None:
        """Make durable what was written."""

    @abstractmethod
    def said(self) -> str:
        """What the user may do with it now, in one line."""

    def open(self) -> None:  # noqa: B027 - most have nothing to open
        """Before anything else."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """After everything else, also after an error."""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class NamedDestination(Destination):
    """One that shows what a run is called, and its recipe."""

    def __init__(self, folder: Path, name: str, run_id: str, config: Config) -> None:
        super().__init__(folder)
        self._name, self._id, self._config = name, run_id, config


Config = Mapping[str, Any]
"""A resolved recipe, as plain data."""
