"""New lines of a run's logs, whatever their number and whatever lies between them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from launch.run import live_view
from launch.run.live_view import LogTail, Tail
from pipeline.data.checksums import seal
from pipeline.data.event_log import EventLog


def test_tail_gives_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    tail = Tail(path)
    assert [*tail.new_lines()] == []
    first, second, third = (seal(f'{{"step": {step}}}\n') for step in range(3))
    path.write_text(first + second[:4])
    assert [*tail.new_lines()] == [{"step": 0}]
    assert [*tail.new_lines()] == []
    with path.open("a") as file:
        file.write(second[4:] + '{"torn\n' + third)
    assert [*tail.new_lines()] == [{"step": 1}, {"step": 2}]


def test_a_long_log_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "_PART_BYTES", 100)
    path = tmp_path / "log.jsonl"
    path.write_text("".join(seal(f'{{"step": {step}}}\n') for step in range(50)))
    tail = Tail(path)
    lines = tail.new_lines()
    assert next(lines) == {"step": 0}
    assert tail.offset < 200, "the rest is still to be read"
    assert [line["step"] for line in lines] == list(range(1, 50))
    assert tail.offset == path.stat().st_size


def test_what_is_no_log_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert [*Tail(tmp_path / "pipe.jsonl").new_lines()] == []
    monkeypatch.setattr(live_view, "MAX_BYTES", 64)
    (tmp_path / "log.jsonl").write_text("x" * 200 + "\n" + seal('{"step": 1}\n'))
    assert [*Tail(tmp_path / "log.jsonl").new_lines()] == [{"step": 1}]


def test_lines_of_all_starts_come_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "_PART_BYTES", 1)
    logs = [EventLog(tmp_path, f"{role}-000001") for role in ("collector", "learner")]
    tail = LogTail(tmp_path, "events")
    for when in range(6):
        monkeypatch.setattr("pipeline.data.event_log.time.time", lambda when=when: float(when))
        logs[when % 2].event("issued", group=when)
    assert [line["group"] for line in tail.new_lines()] == list(range(6))
    assert [*tail.new_lines()] == []


def test_lines_that_were_read_before_another_file_failed_come_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_view, "_PART_BYTES", 1)
    logs = [EventLog(tmp_path, f"{role}-000001") for role in ("collector", "learner")]
    for when in range(6):
        monkeypatch.setattr("pipeline.data.event_log.time.time", lambda when=when: float(when))
        logs[when % 2].event("issued", group=when)
    tail, next_part, failing = LogTail(tmp_path, "events"), Tail._next_part, True

    def part(one: Tail) -> list[bytes]:
        if failing and one.offset and one.path.name.startswith("learner"):
            raise OSError(errno.EIO, "Input/output error")
        return next_part(one)

    monkeypatch.setattr(Tail, "_next_part", part)
    taken: list[int] = []
    with pytest.raises(OSError, match="Input/output"):
        taken.extend(line["group"] for line in tail.new_lines())
    assert taken == [0, 1], "the collector's 2 is read, and not taken"
    failing = False
    assert [line["group"] for line in tail.new_lines()] == [2, 3, 4, 5]
    assert [*tail.new_lines()] == []
