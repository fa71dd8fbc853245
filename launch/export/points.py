"""What a run has to tell other tools: one point a trained step, one an evaluated version, each a set of named numbers.

    train/reward_mean  seconds/update  mismatch/age/0/k3_kl      of a line of metrics (docs/metrics.md), at its step
    evaluation/pass_at_1  evaluation/pass_at_k/8                 of an evaluation, at its version

A resume takes back the steps after its checkpoint and trains them again. A step then has several lines; that of the
latest start of the learner counts, and none of an earlier start from where a later one begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from launch.run.live_view import LogTail
from launch.show.columns import numbers
from pipeline.data.event_log import log_files

STEP: Literal["step"] = "step"
VERSION: Literal["version"] = "version"


class Key(NamedTuple):
    """What a point is about."""

    kind: Literal["step", "version"]
    number: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """`time` (seconds since 1970) tells a step from the same step trained again."""

    key: Key
    time: float
    values: Mapping[str, float]


@dataclass
class RunPoints:
    """The points of a run that may still grow. A damaged line is passed over; pipeline.analysis.run_log names it."""

    run: Path
    _metrics: LogTail = field(init=False)
    _events: LogTail = field(init=False)
    _starts: dict[str, dict[int, Point]] = field(init=False, default_factory=dict)
    """By start of the learner: its steps."""
    _versions: dict[int, Point] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._metrics, self._events = LogTail(self.run, "metrics"), LogTail(self.run, "events")

    def read(self) -> dict[Key, Point]:
        """All points as the logs have them now, by time."""
        for start, line in self._metrics.new_lines_of_starts():
            point = _point(Key(STEP, int(line["step"])), line, of_step(line))
            self._starts.setdefault(start, {})[point.key.number] = point
        for event in self._events.new_lines():
            if event["kind"] == "evaluated":
                version = int(event["version"])
                self._versions[version] = _point(Key(VERSION, version), event, of_evaluation(event))
        points = [*self._steps().values(), *self._versions.values()]
        told = (point for point in points if point.values)
        return {point.key: point for point in sorted(told, key=lambda point: (point.time, point.key))}

    def _steps(self) -> dict[int, Point]:
        kept: dict[int, Point] = {}
        for path in log_files(self.run, "metrics"):
            lines = self._starts.get(path.name, {})
            first = min(lines, default=None)
            if first is not None:
                kept = {step: point for step, point in kept.items() if step < first}
            kept |= lines
        return kept


def of_step(line: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a line of metrics. One without a group of its own is in `train`."""
    found = dict(numbers(line))
    return {name if "/" in name else f"train/{name}": found[name] for name in found if name not in ("step", "time")}


def of_evaluation(event: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of an `evaluated` event, in `evaluation`."""
    return {f"evaluation/{name}": value for name, value in numbers(event) if name not in ("version", "time")}


def _point(key: Key, line: Mapping[str, Any], values: Mapping[str, float]) -> Point:
    return Point(key=key, time=float(line["time"]), values=values)
