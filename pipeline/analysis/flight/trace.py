"""A run's timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is the JSON of the Trace Event Format: an object whose `traceEvents` are complete events (`ph` X, `ts` and
`dur` in microseconds), instants (`ph` i) and names (`ph` M: process_name, thread_name and their sort indices). A part
of the run is a process, a lane is one of its threads. The trace begins at `otherData.began`, seconds since 1970.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.analysis.flight.bottleneck import bottleneck, judged_steps, time_shares
from pipeline.analysis.flight.timeline import COLLECTOR, RANK_ZERO, STEP, Span, timeline
from pipeline.analysis.run_log import RunLog
from pipeline.data.event_log import read_events
from pipeline.errors import StoreError

DEFAULT_STEPS = 20
_INSTANTS = ("published", "saved", "restarted", "admitted", "quarantined", "skipped", "controlled")
_RUN = "run"
_ORDER = ("learner", "publish", COLLECTOR, "engine", "router", "verifiers")


def trace(run_dir: Path, steps: tuple[int, int] | None = None) -> dict[str, Any]:
    """The object to be written as JSON, of all that was under way in the steps [A, B) of the learner; by default its
    last DEFAULT_STEPS. Raises StoreError: no run directory, or none of these steps has finished."""
    run_log = replace(RunLog.read(run_dir), events=read_events(run_dir))  # with all that events say
    damage = list(run_log.damage)
    spans = timeline(run_log, damage)
    chosen = _chosen(spans, steps, run_dir)
    begin, end = min(span.start for span in chosen), max(span.end for span in chosen)
    numbers = sorted({span.number for span in chosen})
    shown = [s for s in spans if s.start < end and s.end > begin and (s.lane != STEP or s.number in numbers)]
    until_then = [s for s in spans if s.part != RANK_ZERO or s.number <= numbers[-1]]
    window = dict(window=len(numbers), stage=run_log.recipe.build_schedule().updates_per_stage)
    shares = time_shares(until_then, **window)
    instants = [event for event in run_log.of_kind(*_INSTANTS) if begin <= float(event["time"]) <= end]
    return {
        "traceEvents": [*_events([_in_microseconds(span, begin) for span in shown]), *_instant_events(instants, begin)],
        "displayTimeUnit": "ms",
        "otherData": {
            "run": run_log.recipe.run.name,
            "began": begin,
            "steps": [numbers[0], numbers[-1] + 1],
            "judged_steps": list(judged_steps(until_then, **window)),
            "shares": shares,
            "damage": damage,
            "bottleneck": bottleneck(shares),
        },
    }


def _chosen(spans: Iterable[Span], steps: tuple[int, int] | None, run_dir: Path) -> list[Span]:
    """The steps of rank 0."""
    finished = [span for span in spans if span.part == RANK_ZERO and span.name == STEP]
    if not finished:
        raise StoreError(f"{run_dir} has no finished step to trace; wait for the first one")
    first, last = min(span.number for span in finished), max(span.number for span in finished)
    low, high = steps or (last + 1 - DEFAULT_STEPS, last + 1)
    chosen = [span for span in finished if low <= span.number < high]
    if not chosen:
        raise StoreError(
            f"{run_dir} has no finished step in {low}:{high}, expected some of {first}:{last + 1}; give --steps"
        )
    return chosen


def _in_microseconds(span: Span, begin: float) -> Span:
    """Whole ones: whatever lay within or behind another span does so still."""
    return replace(span, start=round(1e6 * (span.start - begin)), end=round(1e6 * (span.end - begin)))


def _events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for pid, part in enumerate(sorted({span.part for span in spans}, key=_part_order), start=1):
        events += _names("process", part, pid, 0)
        tid = 0
        for lane in sorted({span.lane for span in spans if span.part == part}):
            rows = _rows([span for span in spans if span.part == part and span.lane == lane])
            for number, row in enumerate(rows, start=1):
                tid += 1
                events += _names("thread", lane if len(rows) == 1 else f"{lane} {number}", pid, tid)
                events += [_complete(span, pid, tid) for span in row]
    return events


def _names(kind: str, name: str, pid: int, tid: int) -> list[dict[str, Any]]:
    place = dict(ph="M", pid=pid, tid=tid)
    return [
        dict(place, name=f"{kind}_name", args=dict(name=name)),
        dict(place, name=f"{kind}_sort_index", args=dict(sort_index=pid if kind == "process" else tid)),
    ]


def _complete(span: Span, pid: int, tid: int) -> dict[str, Any]:
    name = f"{span.name} {span.number}" if span.name == STEP else span.name
    arguments = dict(span.facts) if span.facts or span.number < 0 else dict(number=span.number)
    duration, kind = span.end - span.start, span.part.split()[0]
    return dict(ph="X", name=name, cat=kind, ts=span.start, dur=duration, pid=pid, tid=tid, args=arguments)


def _instant_events(events: Sequence[dict[str, Any]], begin: float) -> list[dict[str, Any]]:
    found = _names("process", _RUN, 0, 0) + _names("thread", "events", 0, 1)
    for event in events:
        arguments = {key: value for key, value in event.items() if key not in ("kind", "time")}
        ts = round(1e6 * (float(event["time"]) - begin))
        found.append(dict(ph="i", s="p", name=event["kind"], cat=_RUN, ts=ts, pid=0, tid=1, args=arguments))
    return found


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans of a lane on as few rows as they need: on one row, a span lies behind or within each other one. Those
    of one name, such as requests, are never put within one another: none is a part of the other."""
    rows: list[_Row] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        row = next((row for row in rows if row.takes(span)), None)
        if row is None:
            rows.append(row := _Row())
        row.add(span)
    return [row.spans for row in rows]


class _Row:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._around: list[Span] = []
        """The last span, and those that it lies in."""

    def takes(self, span: Span) -> bool:
        while self._around and self._around[-1].end <= span.start:
            self._around.pop()
        if not self._around:
            return True
        outer = self._around[-1]
        return outer.name != span.name and span.end <= outer.end

    def add(self, span: Span) -> None:
        self.spans.append(span)
        self._around.append(span)


def _part_order(part: str) -> tuple[int, list[tuple[int, str]]]:
    place = next((place for place, kind in enumerate(_ORDER) if part.startswith(kind)), len(_ORDER))
    return place, [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d+)", part)]
