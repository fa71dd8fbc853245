"""A run as its logs tell it: damaged lines cost themselves alone, and a long run fits in memory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.show.runs import render_list
from pipeline import spans
from pipeline.analysis import run_log as module
from pipeline.analysis import trace
from pipeline.analysis.report import write_report
from pipeline.analysis.run_log import RunLog
from pipeline.analysis.summary import list_runs, summary
from pipeline.data.event_log import EventLog
from tests.support.written_runs import START

WriteRun = Callable[..., Path]


def flip(path: Path, line: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = bytes([lines[line][0] ^ 1]) + lines[line][1:]
    path.write_bytes(b"".join(lines))


def test_damaged_lines_are_passed_over_and_counted_and_nothing_fails(write_run: WriteRun) -> None:
    run = write_run(5)
    metrics, events = run / "metrics/learner-000001.jsonl", run / "events/learner-000001.jsonl"
    flip(metrics, 1)
    flip(metrics, 3)
    flip(events, 4)
    log = RunLog.read(run)
    assert [line["step"] for line in log.metrics] == [0, 2, 4]
    assert log.damage == (
        f"2 lines of {metrics} could not be read and were passed over, the first is line 2",
        f"1 line of {events} could not be read and was passed over, the first is line 5",
    )
    assert summary(run)["warnings"] == list(log.damage)
    assert "2 lines of" in write_report(run).read_text(encoding="utf-8")
    (listed,) = list_runs(run.parent)
    assert "error" not in listed
    render_list(run.parent, [listed])


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("metrics", {"step": 1}),
        ("metrics", {"time": START}),
        ("metrics", {"step": "1", "time": START}),
        ("metrics", {"step": 1, "time": float("nan")}),
        ("events", {"time": START}),
        ("events", {"kind": "restarted"}),
        ("events", {"kind": 3, "time": START}),
        ("events", {"kind": "evaluated", "time": START}),
    ],
)
def test_a_line_that_lacks_what_every_line_has_is_passed_over_too(
    write_run: WriteRun, log: str, line: dict[str, object]
) -> None:
    run = write_run(2)
    (path,) = (run / log).iterdir()
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    assert len(summary(run)["warnings"]) == 1
    write_report(run)


def test_an_evaluation_counts_once_and_by_the_version_that_answered(write_run: WriteRun) -> None:
    """A collector that was killed before it filed an evaluation makes it again, and another version answers."""
    run = write_run(2)
    for start, version in ((2, 5), (3, 6)):
        found = dict(version=version, due=4, answered=[[version, 9]], pass_at_1=version / 10)
        EventLog(run, f"collector-{start:06d}").event("evaluated", **found, time=START + 60.0 * start)
    assert [event["version"] for event in RunLog.read(run).evaluations] == [0, 2, 6]


def test_a_log_that_is_no_file_is_named(write_run: WriteRun) -> None:
    run = write_run(2)
    (run / "metrics/learner-000002.jsonl").mkdir()
    (said,) = RunLog.read(run).damage
    assert "learner-000002.jsonl could not be read to its end (Is a directory)" in said


def test_only_a_trace_reads_spans(write_run: WriteRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are most of what a long run has written."""

    def read(run: Path, *_: object) -> None:
        raise AssertionError(run)

    run = write_run(5)
    monkeypatch.setattr(spans, "read_spans", read)
    monkeypatch.setattr(trace, "read_spans", read)
    assert summary(run)["bottleneck"].startswith("rollouts: the learner waits 55 %")
    write_report(run)
    list_runs(run.parent)


def test_a_long_run_keeps_the_groups_of_some_steps_and_the_numbers_of_all(
    write_run: WriteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = RunLog.read(write_run(300, steps=300, name="short"))
    assert all("mismatch" in line and "log_ratio_histogram" in line for line in short.metrics)
    monkeypatch.setattr(module, "MOST_DETAILED", 20)
    long = RunLog.read(short.run_dir)
    detailed = [line["step"] for line in long.metrics if "log_ratio_histogram" in line]
    assert detailed == [*range(0, 250, 16), *range(250, 300)], "some of the old ones, and the newest"
    for key in ("ess", "seconds/wait", "mismatch/age/0/k3_kl"):
        assert long.series(key) == short.series(key), "alarms and speeds are of every step"
    assert len(long.series("mismatch/age/1/k3_kl")[0]) == len(detailed)


def test_routine_events_are_kept_by_kind_and_time(write_run: WriteRun) -> None:
    run = write_run(1)
    EventLog(run, "learner-000002").event("published", version=1, measured={"load_s": 1.0})
    log = RunLog.read(run)
    assert [set(event) for event in log.of_kind("issued")] == [{"kind", "time"}]
    assert log.of_kind("published")[0]["version"] == 1
    assert log.wall_s > 0


def test_any_flipped_bit_of_a_log_fails_nothing(write_run: WriteRun) -> None:
    """Logs carry no checksums: what is read may be wrong then, and a report is drawn all the same."""
    run, draw = write_run(3), random.Random(0)
    for path in ((run / "metrics").iterdir().__next__(), (run / "events").iterdir().__next__()):
        whole = path.read_bytes()
        for _ in range(300):
            place, bit = draw.randrange(len(whole)), draw.randrange(8)
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            summary(run)
        write_report(run)
        path.write_bytes(whole)
