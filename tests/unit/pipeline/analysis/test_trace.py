"""The trace of recorded logs: every event as the Trace Event Format says, every span where it belongs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.analysis.run_log import RunLog
from pipeline.analysis.trace import timeline, trace
from pipeline.errors import StoreError
from tests.support.traces import check_trace, rows_of
from tests.support.written_runs import SECONDS, START

WriteRun = Callable[..., Path]


def note(run: Path, source: str, *lines: dict[str, Any]) -> None:
    (run / "spans").mkdir(exist_ok=True)
    with (run / "spans" / f"{source}.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def span(lane: str, name: str, start: float, seconds: float, **facts: Any) -> dict[str, Any]:
    return dict(lane=lane, name=name, start=START + start, seconds=seconds, **facts)


def test_a_run_without_recorded_spans_is_traced_from_its_logs(write_run: WriteRun) -> None:
    found = trace(write_run(5), (2, 4))
    check_trace(found)
    rows = rows_of(found)
    assert {part for part, _ in rows} == {"learner rank 0", "collector"}
    assert [event["name"] for event in rows["learner rank 0", "step"]] == [
        name for step in (2, 3) for name in (f"step {step}", *SECONDS)
    ]
    assert found["otherData"]["steps"] == found["otherData"]["judged_steps"] == [2, 4]
    shares = found["otherData"]["shares"]
    assert shares["wait for rollouts"] == pytest.approx(0.55)
    assert shares["wait for commits"] == pytest.approx(0.05, abs=1e-6), "0.1 s of the step's 2 s"
    assert found["otherData"]["bottleneck"].startswith("rollouts: the learner waits ")


def test_recorded_spans_replace_what_is_rebuilt(write_run: WriteRun) -> None:
    run = write_run(3)
    at = 10.0 + 2.0 * 2  # where step 2 begins
    note(
        run,
        "learner-000002.rank-0000",
        span("step", "step", at, 2.0, step=2),
        span("step", "wait", at, 0.5, step=2),
        span("step", "update", at + 0.5, 1.0, step=2),
        span("publish", "score", at + 1.6, 0.1, version=3),
    )
    note(run, "learner-000002.rank-0001", span("step", "step", at, 1.9, step=2), span("step", "wait", at, 0.4, step=2))
    note(
        run,
        "collector-000001",
        span("engine 1/requests", "request", at + 0.1, 0.5, samples=8),
        span("engine 1/requests", "request", at + 0.2, 0.1, samples=8),
        span("engine 1/requests", "request", at + 0.3, 0.3, samples=8),
        span("engine 10/requests", "request", at + 0.3, 0.3, samples=8),
        span("verifiers/worker 0", "score", at + 0.4, 0.2, samples=3),
        span("verifiers/worker 0", "score", at + 40.0, 0.2, samples=3),
    )
    found = trace(run, (2, 3))
    check_trace(found)
    rows = rows_of(found)
    named = [event["args"]["name"] for event in found["traceEvents"] if event["name"] == "process_name"]
    parts = ["learner rank 0", "learner rank 1", "collector", "engine 1", "engine 10", "verifiers", "run"]
    assert sorted(named) == sorted(parts)
    assert [event["name"] for event in rows["learner rank 0", "step"]] == ["step 2", "wait", "update"]
    assert len(rows["engine 1", "requests 1"]) == 1, "requests that overlap lie beside one another"
    assert len(rows["engine 1", "requests 2"]) == 2
    assert rows["verifiers", "worker 0"][0]["args"] == {"samples": 3}, "what came after the step is not in it"


def test_refusals_say_what_there_is(write_run: WriteRun, tmp_path: Path) -> None:
    run = write_run(3)
    with pytest.raises(StoreError, match=r"no finished step in 7:9, expected some of 0:3; give --steps"):
        trace(run, (7, 9))
    with pytest.raises(StoreError, match="no finished step to trace"):
        trace(write_run(0, name="empty"))
    with pytest.raises(StoreError, match="does not exist"):
        trace(tmp_path / "nowhere")


def test_a_damaged_span_is_left_out_and_named(write_run: WriteRun) -> None:
    run = write_run(3)
    note(run, "learner-000001.rank-0000", span("step", "step", 10.0, 1.0, step=0), span("step", "wait", 10.0, 1.0))
    path = run / "spans/learner-000001.rank-0000.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"seconds": 1.0', b'"seconds": 1,0', 1))
    found = trace(run)
    check_trace(found)
    assert found["otherData"]["damage"] == [
        f"1 line of {path} could not be read and was passed over, the first is line 1"
    ]


@pytest.mark.parametrize(
    ("source", "part"),
    [("learner-000002.rank-0013", "learner rank 13"), ("collector-000001", "collector"), ("odd", "odd")],
)
def test_parts_do_not_depend_on_the_start(write_run: WriteRun, source: str, part: str) -> None:
    run = write_run(1)
    note(run, source, span("lane", "name", 10.0, 1.0))
    assert part in {found.part for found in timeline(RunLog.read(run), []) if found.lane == "lane"}
