"""Spans: kept by who noted them, in files of bounded size, never in the way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import spans
from pipeline.spans import Stopwatch


def test_spans_come_back_by_source_with_their_facts(tmp_path: Path) -> None:
    with spans.recorded(tmp_path, "learner-000001.rank-0002"):
        before = time.time()
        with spans.span("step", "step", step=4):
            watch = Stopwatch(lane="step", step=4)
            with watch.phase("wait"):
                pass
            watch.lap("load_s")
        with pytest.raises(KeyError), spans.span("engine 0/weights", "pause"):
            raise KeyError
    [(source, lines)] = spans.read_spans(tmp_path).items()
    assert source == "learner-000001.rank-0002"
    wait, load, step, pause = lines
    assert [(line["name"], line.get("step")) for line in (wait, load, step)] == [("wait", 4), ("load", 4), ("step", 4)]
    assert (pause["lane"], pause["name"]) == ("engine 0/weights", "pause"), "also one that ends by an error"
    assert before - 1.0 < step["start"] <= wait["start"] <= time.time() + 1.0
    for inner in (wait, load):
        assert inner["start"] + inner["seconds"] <= step["start"] + step["seconds"] + 5e-7


def test_nothing_is_kept_outside_of_a_recording(tmp_path: Path) -> None:
    with spans.recorded(tmp_path, "collector-000001"):
        pass
    spans.note("step", "wait", 0.0, 1.0)
    assert spans.read_spans(tmp_path) == {}


def test_a_source_keeps_its_newest_spans_within_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MAX_BYTES", 4000)
    monkeypatch.setattr(spans, "FLUSH_S", 0.005)
    with spans.recorded(tmp_path, "collector-000001"):
        for number in range(200):
            spans.note("step", "wait", number, number + 1.0, step=number)
            time.sleep(0.001)
    sizes = [path.stat().st_size for path in (tmp_path / "spans").iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 4000
    kept = sorted(line["step"] for line in spans.read_spans(tmp_path)["collector-000001"])
    assert kept == list(range(kept[0], 200)), "the newest are there, without a gap"
    assert kept[0] > 0


def test_a_disk_that_takes_nothing_costs_spans_only(tmp_path: Path) -> None:
    (tmp_path / "spans").write_text("a file, where the folder should be")
    with spans.recorded(tmp_path, "collector-000001"):
        spans.note("step", "wait", 0.0, 1.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time is the only entry."""
    now = [100.0]
    monkeypatch.setattr(spans.time, "monotonic", lambda: now[0])
    return now


def test_a_phase_inside_another_keeps_its_own_time(clock: list[float]) -> None:
    def gathered() -> Iterator[int]:
        for item in range(3):
            clock[0] += 2.0
            yield item

    watch = Stopwatch(("gather", "quantize", "send"))

    def quantized(stream: Iterator[int]) -> Iterator[int]:
        for item in stream:
            clock[0] += 5.0
            yield item

    found = []
    for item in watch.timed("quantize", quantized(watch.timed("gather", gathered()))):
        clock[0] += 100.0  # the consumer's own time
        found.append(item)
    assert found == [0, 1, 2]
    assert watch.seconds == {"gather": 6.0, "quantize": 15.0, "send": 0.0}
    assert watch.total_s == 321.0
