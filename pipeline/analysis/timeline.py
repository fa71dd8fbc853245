"""When each phase of the two loops began and ended, rebuilt from the event log.

A metrics line is written when its step has ended, and its phases follow one another, so they are laid out backwards
from that moment. A `committed` event says when its batch was started, and its phases are laid out forwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.analysis.bottleneck import LEARNER_PHASES

COLLECTOR_PHASES = ("generate", "hold", "evaluate", "commit")
"""In the order in which they happen within a batch. `hold` waits until the batch before it is committed; `evaluate`
waits for the version that is evaluated, too."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """`start` and `end` in unix seconds; `number` is the step, batch or version, `lane` a row of a chart."""

    lane: str
    phase: str
    number: int
    start: float
    end: float


def learner_intervals(metrics: Sequence[Mapping[str, Any]]) -> list[Interval]:
    """The phases of each step."""
    intervals = []
    for line in metrics:
        seconds = {phase: float((line.get("seconds") or {}).get(phase, 0.0)) for phase in LEARNER_PHASES}
        start = float(line["time"]) - sum(seconds.values())
        intervals += _lay_out("learner", int(line["step"]), start, seconds)
    return intervals


def collector_intervals(events: Sequence[Mapping[str, Any]]) -> list[Interval]:
    """The phases of each batch, batches that overlap on lanes of their own, and the evaluations."""
    intervals, lane_ends = [], list[float]()
    for event in sorted((e for e in events if e["kind"] == "committed" and "started" in e), key=lambda e: e["started"]):
        spent = event.get("seconds") or {}
        seconds = {phase: float(spent.get(phase, 0.0)) for phase in COLLECTOR_PHASES}
        start = float(event["started"])
        lane = next((i for i, end in enumerate(lane_ends) if end <= start), len(lane_ends))
        lane_ends[lane : lane + 1] = [start + sum(seconds.values())]
        intervals += _lay_out(f"batches {lane + 1}", int(event["batch"]), start, seconds)
    for event in events:
        if event["kind"] == "evaluated" and event.get("seconds"):
            end = float(event["time"])
            start = end - float(event["seconds"])
            intervals.append(
                Interval(lane="evaluation", phase="evaluate", number=int(event["version"]), start=start, end=end)
            )
    return intervals


def _lay_out(lane: str, number: int, start: float, seconds: Mapping[str, float]) -> list[Interval]:
    intervals = []
    for phase, spent in seconds.items():
        if spent > 0:
            intervals.append(Interval(lane=lane, phase=phase, number=number, start=start, end=start + spent))
        start += spent
    return intervals
