"""What an exporter asks of the tool that it writes for.

Nothing but the destination says what was exported: there is no file beside it that a kill could leave untrue.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from launch.export.points import Key, Point


class Destination(Protocol):
    """A context manager. It belongs to one run, and to one exporter at a time."""

    def held(self) -> Mapping[Key, float]:
        """The time of each point that it holds whole, to the millisecond; asked once, before anything else."""

    def clear(self) -> None:
        """Remove all points. Killed amidst of it, it may hold any of them."""

    def write(self, point: Point) -> None:
        """Add a point; after a kill it is there whole or not at all."""

    def flush(self) -> None:
        """Make durable what was written."""

    def said(self) -> str:
        """What the user may do with it now, in one line."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


Config = Mapping[str, Any]
"""A resolved recipe, as plain data."""
