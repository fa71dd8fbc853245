"""The points that a run has for other tools: one a trained step, one an evaluated version, each of named numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from pipeline.analysis.run_log import numbers
from pipeline.data.event_log import LogTail, log_files

STEP: Literal["step"] = "step"
VERSION: Literal["version"] = "version"


class Key(NamedTuple):
    """The step or the version that a point is about."""

    kind: Literal["step", "version"]
    number: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """`time` (seconds since 1970) tells a step from the same step trained again."""

    key: Key
    time: float
    values: Mapping[str, float]


class Destination(Protocol):
    """The files of a tool. They belong to one run, and to one exporter at a time."""

    hint: str
    """What the user may do with them, in one line."""

    def clear(self) -> None:
        """Remove all points."""

    def write(self, point: Point) -> None:
        """Add a point; after a kill it is there whole or not at all."""

    def flush(self) -> None:
        """Make what was written readable."""

    def close(self) -> None:
        """End the files, also after an error."""


@dataclass
class RunPoints:
    """The points of a run that may still grow."""

    run: Path
    _metrics: LogTail = field(init=False)
    _events: LogTail = field(init=False)
    _starts: dict[str, dict[int, Point]] = field(init=False, default_factory=dict)
    """By start of the learner: its steps."""
    _versions: dict[int, Point] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._metrics, self._events = LogTail(self.run, "metrics"), LogTail(self.run, "events")

    def read(self) -> dict[Key, Point]:
        """Return all points as the logs have them now, by time."""
        for start, line in self._metrics.new_lines():
            found = {name if "/" in name else f"train/{name}": value for name, value in numbers(line)}
            values = {name: value for name, value in found.items() if name not in ("train/step", "train/time")}
            point = Point(key=Key(STEP, line["step"]), time=float(line["time"]), values=values)
            self._starts.setdefault(start, {})[point.key.number] = point
        for _, event in self._events.new_lines():
            if event["kind"] == "evaluated":
                told = [one for one in numbers(event) if one[0] not in ("version", "time")]
                values = {f"evaluation/{name}": value for name, value in told}
                point = Point(key=Key(VERSION, event["version"]), time=float(event["time"]), values=values)
                self._versions[point.key.number] = point
        steps: dict[int, Point] = {}
        for path in log_files(self.run, "metrics"):
            if lines := self._starts.get(path.name):
                steps = {step: point for step, point in steps.items() if step < min(lines)} | lines
        points = [point for point in (*steps.values(), *self._versions.values()) if point.values]
        return {point.key: point for point in sorted(points, key=lambda point: (point.time, point.key))}
