"""When each part of a run did what.

    metrics.seconds of a step ──▶ learner rank 0   unless that rank noted its phases itself
    committed, evaluated      ──▶ collector
    RUN/spans (pipeline.spans) ─▶ every rank, engines as their askers saw them, verifiers, publishes: for a trace alone

A metrics line is written when its step has ended, and its phases follow one another, so they are laid out backwards
from that moment. A `committed` event says when its batch was started, and its phases are laid out forwards. Clocks are
those of the hosts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.analysis.run_log import RunLog
from pipeline.spans import read_spans

LEARNER_PHASES = ("wait", "logprobs", "update", "publish", "record", "save")
"""In the order in which they happen within a step."""
COLLECTOR_PHASES = ("generate", "hold", "evaluate", "commit")
"""In the order in which they happen within a batch. `hold` waits until the batch before it is committed; `evaluate`
waits for the version that is evaluated, too."""
RANK_ZERO, COLLECTOR = "learner rank 0", "collector"
STEP = "step"
"""The lane of a rank on which the phases of its steps lie, and the name of the span around them."""
_NUMBERS = ("step", "batch", "version")


@dataclass(frozen=True, kw_only=True)
class Span:
    """`start` and `end` in seconds since 1970; `number` is the step, batch or version, -1 where there is none."""

    part: str
    """Which rank, engine or other part of the run."""
    lane: str
    """A row of a chart."""
    name: str
    number: int
    start: float
    end: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    def overlap_s(self, other: Span) -> float:
        """Seconds that both share."""
        return max(0.0, min(self.end, other.end) - max(self.start, other.start))


def last_steps(run_log: RunLog, count: int) -> list[Span]:
    """The phases of the last `count` steps, and what the collector did meanwhile, as metrics and events tell them."""
    learner = learner_spans(run_log.metrics[-count:])
    begin = min((span.start for span in learner), default=math.inf)
    return [*learner, *collector_spans([event for event in run_log.events if event["time"] > begin])]


def timeline(run_log: RunLog, damage: list[str]) -> list[Span]:
    """All that is known, by start. Reads every span of the run; `damage` is as in
    pipeline.data.event_log.read_lines."""
    recorded = recorded_spans(run_log, damage)
    known = {span.number for span in recorded if span.part == RANK_ZERO and span.name == STEP}
    rebuilt = [span for span in learner_spans(run_log.metrics) if span.number not in known]
    return sorted([*recorded, *rebuilt, *collector_spans(run_log.events)], key=lambda span: (span.start, -span.end))


def learner_spans(metrics: Sequence[Mapping[str, Any]]) -> list[Span]:
    """The phases of each step, as its line of metrics tells them."""
    spans = []
    for line in metrics:
        seconds = {phase: float((line.get("seconds") or {}).get(phase, 0.0)) for phase in LEARNER_PHASES}
        end, number = float(line.get("time", 0.0)), int(line["step"])
        start = end - sum(seconds.values())
        if end > start:
            spans.append(Span(part=RANK_ZERO, lane=STEP, name=STEP, number=number, start=start, end=end))
        spans += _lay_out(RANK_ZERO, STEP, number, start, seconds)
    return spans


def collector_spans(events: Sequence[Mapping[str, Any]]) -> list[Span]:
    """The phases of each batch, batches that overlap on lanes of their own, and the evaluations."""
    spans, lane_ends = [], list[float]()
    for event in sorted((e for e in events if e["kind"] == "committed" and "started" in e), key=lambda e: e["started"]):
        spent = event.get("seconds") or {}
        seconds = {phase: float(spent.get(phase, 0.0)) for phase in COLLECTOR_PHASES}
        start = float(event["started"])
        lane = next((i for i, end in enumerate(lane_ends) if end <= start), len(lane_ends))
        lane_ends[lane : lane + 1] = [start + sum(seconds.values())]
        spans += _lay_out(COLLECTOR, f"batches {lane + 1}", int(event["batch"]), start, seconds)
    for event in events:
        if event["kind"] == "evaluated" and event.get("seconds"):
            end, number = float(event["time"]), int(event["version"])
            start = end - float(event["seconds"])
            spans.append(Span(part=COLLECTOR, lane="evaluation", name="evaluate", number=number, start=start, end=end))
    return spans


def recorded_spans(run_log: RunLog, damage: list[str]) -> list[Span]:
    """What the processes noted themselves."""
    return [
        _recorded(source, line)
        for source, lines in read_spans(run_log.run_dir, damage).items()
        for line in lines
        if float(line["seconds"]) >= 0.0
    ]


def _recorded(source: str, line: Mapping[str, Any]) -> Span:
    part, slash, lane = str(line["lane"]).rpartition("/")
    facts = {key: value for key, value in line.items() if key not in ("lane", "name", "start", "seconds")}
    start = float(line["start"])
    return Span(
        part=part if slash else part_of(source),
        lane=lane,
        name=str(line["name"]),
        number=next((int(facts[key]) for key in _NUMBERS if key in facts), -1),
        start=start,
        end=start + float(line["seconds"]),
        facts=facts,
    )


def part_of(source: str) -> str:
    """`learner-000002.rank-0003` is learner rank 3, whatever its start; `collector-000001` is the collector."""
    start, _, rank = source.partition(".")
    role = start.rpartition("-")[0] or start
    return f"{role} rank {int(rank.removeprefix('rank-'))}" if rank else role


def _lay_out(part: str, lane: str, number: int, start: float, seconds: Mapping[str, float]) -> list[Span]:
    spans = []
    for name, spent in seconds.items():
        if spent > 0:
            spans.append(Span(part=part, lane=lane, name=name, number=number, start=start, end=start + spent))
        start += spent
    return spans
