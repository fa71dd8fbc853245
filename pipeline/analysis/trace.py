"""Build a trace of a run's processes for Perfetto (ui.perfetto.dev) and chrome://tracing.

    metrics.seconds of a step ──▶ learner rank 0   unless that rank noted its phases itself
    committed, evaluated      ──▶ collector
    RUN/spans (pipeline.spans) ─▶ every rank, engines as their callers saw them, episodes outside the
                                 policy, verifiers, publishes

A metrics line is written at the end of its step, so its phases are laid out backward from that time. A `committed`
event holds the start of its batch, so its phases are laid out forward. Times are of each host's clock.

The format is the JSON of the Trace Event Format: an object whose `traceEvents` are complete events (`ph` X, `ts` and
`dur` in microseconds), instants (`ph` i) and names (`ph` M: process_name, thread_name and their sort indices). A part
of the run is a process, a lane is one of its threads. The trace begins at `otherData.began`, seconds since 1970.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.analysis.run_log import RunLog
from pipeline.analysis.summary import COLLECTOR_PHASES, LEARNER_PHASES, bottleneck, judged_lines, time_shares
from pipeline.data.event_log import read_events
from pipeline.errors import StoreError
from pipeline.spans import read_spans

DEFAULT_STEPS = 20
RANK_ZERO, COLLECTOR = "learner rank 0", "collector"
STEP = "step"
"""Lane of a rank with the phases of its steps, and name of the span around each step."""
_NUMBERS = ("step", "batch", "version")
_INSTANTS = ("published", "saved", "restarted", "admitted", "quarantined", "skipped", "controlled")
_ORDER = ("learner", "publish", COLLECTOR, "engine", "router", "episodes", "verifiers")


@dataclass(frozen=True, kw_only=True)
class Span:
    """An interval of work on a lane of a part of the run, such as a rank or an engine. `start` and `end` are seconds
    since 1970; `number` is the step, batch or version, or -1."""

    part: str
    lane: str
    name: str
    number: int
    start: float
    end: float
    facts: Mapping[str, Any] = field(default_factory=dict)


def trace(run_dir: Path, steps: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return the trace, to be written as JSON, of all work during the steps [A, B) of the learner, by default its last
    DEFAULT_STEPS. Raises StoreError: no run directory, or none of these steps has finished."""
    run_log = replace(RunLog.read(run_dir), events=read_events(run_dir))  # RunLog leaves out parts of events
    damage = list(run_log.damage)
    finished = {line["step"]: line for line in run_log.metrics if line.get("seconds")}
    if not finished:
        raise StoreError(f"{run_dir} has no finished step to trace; wait for the first one")
    low, high = steps or (max(finished) + 1 - DEFAULT_STEPS, max(finished) + 1)
    chosen = [line for step, line in finished.items() if low <= step < high]
    if not chosen:
        there = f"{min(finished)}:{max(finished) + 1}"
        raise StoreError(f"{run_dir} has no finished step in {low}:{high}, expected some of {there}; give --steps")
    numbers = {line["step"] for line in chosen}
    of_steps = [span for span in _learner_spans(chosen) if span.name == STEP]
    begin, end = min(span.start for span in of_steps), max(span.end for span in of_steps)
    # A step saves after its metrics line: read spans up to the line of the next step.
    next_line = min((float(line["time"]) for step, line in finished.items() if step > max(numbers)), default=math.inf)
    spans = timeline(run_log, damage, begin, max(end, next_line))
    if noted := [span for span in spans if span.part == RANK_ZERO and span.name == STEP and span.number in numbers]:
        begin, end = min(span.start for span in noted), max(span.end for span in noted)
    shown = [s for s in spans if s.start < end and s.end > begin and (s.lane != STEP or s.number in numbers)]
    window = dict(window=len(numbers), stage=run_log.recipe.build_schedule().updates_per_stage)
    until_then = [line for step, line in finished.items() if step <= max(numbers)]
    shares = time_shares(until_then, run_log.of_kind("committed"), **window)
    judged = [int(line["step"]) for line in judged_lines(until_then, **window)]
    instants = [event for event in run_log.of_kind(*_INSTANTS) if begin <= float(event["time"]) <= end]
    return {
        "traceEvents": list(_trace_events(shown, instants, begin)),
        "displayTimeUnit": "ms",
        "otherData": {
            "run": run_log.recipe.run.name,
            "began": begin,
            "steps": [min(numbers), max(numbers) + 1],
            "judged_steps": [judged[0], judged[-1] + 1],
            "shares": shares,
            "damage": damage,
            "bottleneck": bottleneck(shares),
        },
    }


def timeline(run_log: RunLog, damage: list[str], begin: float = -math.inf, end: float = math.inf) -> list[Span]:
    """Return all known spans from `begin` to `end`, by start; `damage` is as in pipeline.data.event_log.read_lines."""
    recorded = []
    for source, lines in read_spans(run_log.run_dir, damage, begin, end).items():
        start, _, rank = source.partition(".")
        role = start.rpartition("-")[0] or start
        owner = f"{role} rank {int(rank.removeprefix('rank-'))}" if rank else role
        for line in lines:  # a lane with a slash belongs to the part that is named before it
            part, slash, lane = str(line["lane"]).rpartition("/")
            facts = {key: value for key, value in line.items() if key not in ("lane", "name", "start", "seconds")}
            number = next((int(facts[key]) for key in _NUMBERS if key in facts), -1)
            begun, name = float(line["start"]), str(line["name"])
            times = dict(start=begun, end=begun + float(line["seconds"]))
            recorded.append(
                Span(part=part if slash else owner, lane=lane, name=name, number=number, **times, facts=facts)
            )
    known = {span.number for span in recorded if span.part == RANK_ZERO and span.name == STEP}
    found = [span for span in _learner_spans(run_log.metrics) if span.number not in known]
    # The phases of each batch, overlapping batches on separate lanes, and the evaluations.
    lane_ends, batches = list[float](), [e for e in run_log.events if e["kind"] == "committed" and "started" in e]
    for event in sorted(batches, key=lambda e: e["started"]):
        spent = event.get("seconds") or {}
        seconds = {phase: float(spent.get(phase, 0.0)) for phase in COLLECTOR_PHASES}
        started = float(event["started"])
        place = next((i for i, ended in enumerate(lane_ends) if ended <= started), len(lane_ends))
        lane_ends[place : place + 1] = [started + sum(seconds.values())]
        found += _laid_out(COLLECTOR, f"batches {place + 1}", int(event["batch"]), started, seconds)
    for event in run_log.events:
        if event["kind"] == "evaluated" and event.get("seconds"):
            number, until = int(event["version"]), float(event["time"])
            started = until - float(event["seconds"])
            found.append(
                Span(part=COLLECTOR, lane="evaluation", name="evaluate", number=number, start=started, end=until)
            )
    found = [span for span in found if span.start < end and span.end > begin]
    return sorted([*recorded, *found], key=lambda span: (span.start, -span.end))


def _learner_spans(metrics: Sequence[Mapping[str, Any]]) -> Iterator[Span]:
    """Yield the phases of each step, and the step around them, from its metrics line."""
    for line in metrics:
        seconds = {phase: float((line.get("seconds") or {}).get(phase, 0.0)) for phase in LEARNER_PHASES}
        end, number = float(line["time"]), int(line["step"])
        start = end - sum(seconds.values())
        if end > start:
            yield Span(part=RANK_ZERO, lane=STEP, name=STEP, number=number, start=start, end=end)
        yield from _laid_out(RANK_ZERO, STEP, number, start, seconds)


def _laid_out(part: str, lane: str, number: int, start: float, seconds: Mapping[str, float]) -> Iterator[Span]:
    for name, spent in seconds.items():
        if spent > 0:
            yield Span(part=part, lane=lane, name=name, number=number, start=start, end=start + spent)
        start += spent


def _trace_events(spans: Sequence[Span], instants: Sequence[dict[str, Any]], begin: float) -> Iterator[dict[str, Any]]:
    """Yield complete events by part and lane, then the instants, and the names of both."""

    def order(part: str) -> tuple[int, list[tuple[int, str]]]:
        place = next((place for place, kind in enumerate(_ORDER) if part.startswith(kind)), len(_ORDER))
        return place, [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d+)", part)]

    for pid, part in enumerate(sorted({span.part for span in spans}, key=order), start=1):
        yield from _names("process", part, pid, 0)
        tid = 0
        for lane in sorted({span.lane for span in spans if span.part == part}):
            # Rounding both ends keeps spans nested or in sequence.
            own = [
                replace(span, start=round(1e6 * (span.start - begin)), end=round(1e6 * (span.end - begin)))
                for span in spans
                if span.part == part and span.lane == lane
            ]
            rows = _rows(own)
            for number, row in enumerate(rows, start=1):
                tid += 1
                yield from _names("thread", lane if len(rows) == 1 else f"{lane} {number}", pid, tid)
                for span in row:
                    name = f"{span.name} {span.number}" if span.name == STEP else span.name
                    told = dict(span.facts) if span.facts or span.number < 0 else dict(number=span.number)
                    at = dict(ts=span.start, dur=span.end - span.start, pid=pid, tid=tid)
                    yield dict(ph="X", name=name, cat=span.part.split()[0], **at, args=told)
    yield from _names("process", "run", 0, 0) + _names("thread", "events", 0, 1)
    for event in instants:
        told = {key: value for key, value in event.items() if key not in ("kind", "time")}
        at = dict(ts=round(1e6 * (float(event["time"]) - begin)), pid=0, tid=1)
        yield dict(ph="i", s="p", name=event["kind"], cat="run", **at, args=told)


def _names(kind: str, name: str, pid: int, tid: int) -> list[dict[str, Any]]:
    place = dict(ph="M", pid=pid, tid=tid)
    return [
        dict(place, name=f"{kind}_name", args=dict(name=name)),
        dict(place, name=f"{kind}_sort_index", args=dict(sort_index=pid if kind == "process" else tid)),
    ]


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """Put the spans of a lane on as few rows as they need; two spans on a row are nested or do not overlap. Spans of
    the same name, such as requests, are never nested: neither is a part of the other."""
    rows: list[list[Span]] = []
    around: list[list[Span]] = []
    """For each row, its last span and the spans around it."""
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        for outer in around:
            while outer and outer[-1].end <= span.start:
                outer.pop()
        fits = (not outer or (outer[-1].name != span.name and span.end <= outer[-1].end) for outer in around)
        place = next((place for place, fit in enumerate(fits) if fit), len(rows))
        if place == len(rows):
            rows.append([])
            around.append([])
        rows[place].append(span)
        around[place].append(span)
    return rows
