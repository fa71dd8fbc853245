from __future__ import annotations

from itertools import pairwise

import pytest

from pipeline.analysis.flight.timeline import collector_spans, learner_spans


def test_learner_phases_end_when_the_line_was_written() -> None:
    seconds = {"wait": 3.0, "logprobs": 1.0, "update": 2.0, "publish": 0.0, "save": 0.5}
    intervals = learner_spans([{"step": 4, "time": 100.0, "seconds": seconds}])
    assert [(i.name, i.start, i.end) for i in intervals] == [
        ("step", 93.5, 100.0),
        ("wait", 93.5, 96.5),
        ("logprobs", 96.5, 97.5),
        ("update", 97.5, 99.5),
        ("save", 99.5, 100.0),
    ]
    assert {i.number for i in intervals} == {4}


def committed(batch: int, started: float, generate: float) -> dict[str, object]:
    return {"kind": "committed", "batch": batch, "started": started, "seconds": {"generate": generate, "commit": 1.0}}


def test_overlapping_batches_get_their_own_lanes_and_lanes_are_used_again() -> None:
    events = [committed(0, 0.0, 9.0), committed(1, 5.0, 9.0), committed(2, 10.0, 1.0)]
    lanes = {i.number: i.lane for i in collector_spans(events)}
    assert lanes == {0: "batches 1", 1: "batches 2", 2: "batches 1"}


def test_a_lane_never_holds_two_batches_at_once() -> None:
    events = [committed(batch, 0.7 * batch, 1.0 + (batch * 37 % 11) / 3) for batch in range(40)]
    by_lane: dict[str, list[tuple[float, float]]] = {}
    for interval in collector_spans(events):
        by_lane.setdefault(interval.lane, []).append((interval.start, interval.end))
    for spans in by_lane.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans))


def test_evaluation_ends_at_its_event() -> None:
    (interval,) = collector_spans([{"kind": "evaluated", "version": 20, "time": 50.0, "seconds": 4.0}])
    assert (interval.lane, interval.name, interval.number) == ("evaluation", "evaluate", 20)
    assert (interval.start, interval.end) == pytest.approx((46.0, 50.0))
