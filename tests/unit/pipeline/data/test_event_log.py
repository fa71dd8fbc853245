"""Journals: one write a line, torn lines cost themselves only, and numbers are finite."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.event_log import EventLog, LogTail, read_events, read_metrics
from pipeline.errors import NonFiniteError


def test_lines_come_back_in_order_with_their_time(tmp_path: Path) -> None:
    event_log, before = EventLog(tmp_path, "learner-000001"), time.time()
    event_log.event("issued", batch=0, first_group=0)
    event_log.event("dropped", group=3, reason="zu lang: é\n")
    event_log.event("issued", batch=1)
    events = read_events(tmp_path)
    assert [event["kind"] for event in events] == ["issued", "dropped", "issued"]
    assert events[1]["reason"] == "zu lang: é\n"
    assert all(before <= event["time"] <= time.time() for event in events)
    assert [event["batch"] for event in read_events(tmp_path, "issued")] == [0, 1]


def test_numpy_values_paths_and_nesting(tmp_path: Path) -> None:
    EventLog(tmp_path, "learner-000001").metrics(
        0,
        ess=np.float32(0.5),
        count=np.int64(3),
        flag=np.bool_(True),
        histogram=np.array([1.5, 2.0]),
        seconds={"wait": np.float64(0.25)},
        spans=[(0, 1)],
        path=Path("a/b"),
        nothing=None,
    )
    (line,) = read_metrics(tmp_path)
    del line["time"]
    assert line == dict(
        step=0, ess=0.5, count=3, flag=True, histogram=[1.5, 2.0], seconds={"wait": 0.25}, spans=[[0, 1]], path="a/b",
        nothing=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        (dict(loss=float("nan")), "loss is nan"),
        (dict(loss=np.float32("inf")), "loss is inf"),
        (dict(seconds={"wait": float("-inf")}), r"seconds\.wait is -inf"),
        (dict(histogram=np.array([0.0, np.nan])), r"histogram\[1\] is nan"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, fields: dict[str, object], where: str) -> None:
    event_log = EventLog(tmp_path, "learner-000001")
    with pytest.raises(NonFiniteError, match=where):
        event_log.metrics(0, **fields)
    assert read_metrics(tmp_path) == []


def test_a_line_torn_anywhere_costs_only_itself(tmp_path: Path) -> None:
    EventLog(tmp_path, "learner-000001").metrics(0, loss=1.5, text="é")
    path = tmp_path / "metrics" / "learner-000001.jsonl"
    whole = path.read_bytes()
    for length in range(1, len(whole)):
        path.write_bytes(whole + whole[:length])
        assert [line["step"] for line in read_metrics(tmp_path)] == [0]
        EventLog(tmp_path, "learner-000001").metrics(1, loss=2.5)
        lines = read_metrics(tmp_path)
        assert [(line["step"], line["loss"]) for line in lines] == [(0, 1.5), (1, 2.5)]


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event_log = EventLog(tmp_path, "learner-000001")
    event_log.metrics(0)
    write, room = os.write, 20

    def fill(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written, room = write(descriptor, bytes(data[:room])), 0
        return written

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.data.event_log.os.write", fill)
        with pytest.raises(OSError, match=r"No space left .*learner-000001.jsonl"):
            event_log.metrics(1)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0]
    event_log.metrics(1)  # half a line would make this one part of it
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]


def test_the_newest_start_has_the_last_word_on_a_step(tmp_path: Path) -> None:
    for start, steps in ((2, (1, 2)), (10, (2, 3)), (1, (0, 1))):
        for step in steps:
            EventLog(tmp_path, f"learner-{start:06d}").metrics(step, loss=float(start))
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == [
        (0, 1.0),
        (1, 2.0),
        (2, 10.0),
        (3, 10.0),
    ]


def test_events_of_all_sources_are_merged_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((5.0, 7.0, 6.0, 1.0, 6.5))
    monkeypatch.setattr("pipeline.data.event_log.time.time", lambda: next(times))
    collector, learner = EventLog(tmp_path, "collector-000001"), EventLog(tmp_path, "learner-000001")
    for number in range(3):
        collector.event("issued", batch=number)  # the clock of its host was set back before the last one
    learner.event("consumed", step=0)
    learner.event("consumed", step=1)
    found = [event.get("batch", f"step {event.get('step')}") for event in read_events(tmp_path)]
    assert found == ["step 0", 0, "step 1", 1, 2], "those of one source stay in order"


def test_observers_get_each_line_once_it_is_written(tmp_path: Path) -> None:
    seen: list[tuple[str, object]] = []
    event_log = EventLog(tmp_path, "learner-000001", [lambda log, line: seen.append((log, line))])
    event_log.metrics(3, loss=np.float32(0.5))
    event_log.event("saved", step=4)
    assert seen == [("metrics", read_metrics(tmp_path)[0]), ("event", read_events(tmp_path)[0])]


def test_a_tail_gives_each_complete_line_once_and_by_time(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    first, second, third, fourth = (f'{{"kind": "issued", "batch": {n}, "time": {n}}}\n' for n in range(4))
    path = folder / "collector-000001.jsonl"
    path.write_text(first + third[:9])
    (folder / "learner-000001.jsonl").write_text(second)
    tail = LogTail(tmp_path, "events")
    assert [line["batch"] for _, line in tail.new_lines()] == [0, 1]
    assert [*tail.new_lines()] == []
    with path.open("a") as file:
        file.write(third[9:] + '{"torn\n' + fourth)
    assert [line["batch"] for _, line in tail.new_lines()] == [2, 3]
