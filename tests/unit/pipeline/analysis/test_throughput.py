"""Tokens a second, the use of the learner's GPUs, and what a run was made with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.analysis.figures.throughput import speeds, throughput_figures, throughput_text, why_no_mfu
from pipeline.analysis.html_report import write_report
from pipeline.analysis.run_environment import environment_rows
from pipeline.analysis.run_log import RunLog
from pipeline.data.event_log import EventLog
from tests.support.written_runs import START, write_run

WriteRun = Callable[..., Path]
H100 = dict(gpus=["NVIDIA H100 80GB HBM3"] * 2, peak_tflops=989.0)


def noted(run: Path, role: str = "learner", at: float = START, **others: Any) -> RunLog:
    told = dict(host="node-a", cores=16, gpus=[], python="3.11.9", packages=dict(torch="2.13.0"), commit="0123456789ab")
    facts = dict(ranks=2, active_parameters=1_000_000_000) if role == "learner" else {}
    EventLog(run, f"{role}-000009").event("environment", role=role, time=at, **{**told, **facts, **others})
    return RunLog.read(run)


def test_speeds_by_hand(write_run: WriteRun) -> None:
    speed = speeds(RunLog.read(write_run(3)))[2]
    assert speed["generated"] == pytest.approx(256 * 7.75 / 1.0)  # samples · mean length ÷ seconds of generating
    assert speed["updated"] == pytest.approx(2000 / 0.6)
    assert speed["trained"] == pytest.approx(2000 / 2.0)
    assert speed["mfu"] is None


def test_batches_that_are_generated_together_share_the_time(write_run: WriteRun) -> None:
    """Three batches from second 100 on; the engines make 1,000 tokens a second all the while. The second batch is done
    before the first, as its answers are short; a fourth is begun after a pause."""
    run = write_run(0)
    log = EventLog(run, "collector-000002")
    for batch, started, done, samples in (
        (0, 100, 105, 200),
        (1, 100, 103, 300),
        (2, 100, 110, 500),
        (3, 120, 122, 200),
    ):
        seconds = dict(generate=float(done - started), hold=1.0)
        log.event("committed", batch=batch, samples=samples, started=float(started), seconds=seconds)
        log.metrics(batch, num_tokens=10, response_tokens_mean=10.0, seconds=dict(update=1.0))
    assert [line["generated"] for line in speeds(RunLog.read(run))] == pytest.approx([1000.0] * 4)


def test_mfu_by_hand(tmp_path: Path) -> None:
    run_log = noted(write_run(tmp_path, 2), **H100)
    assert speeds(run_log)[1]["mfu"] == pytest.approx(6 * 1e9 * 4096 / (0.4 * 2 * 989e12))
    assert why_no_mfu(run_log) == ""
    assert "There is no MFU" not in throughput_text(run_log)
    assert all(svg is not None for _, svg in throughput_figures(run_log))


def test_samples_that_are_left_out_of_the_updates_make_no_speed(tmp_path: Path) -> None:
    """Half of the 256 samples, of 16 tokens each."""
    run = write_run(tmp_path, 1)
    EventLog(run, "learner-000002").metrics(
        1,
        num_tokens=2000,
        num_updated_tokens=1000,
        num_model_tokens=2048,
        response_tokens_mean=7.75,
        prompt_tokens_mean=8.25,
        seconds=dict(wait=0.6, update=0.4),
        time=START + 20,
    )
    speed = speeds(noted(run, **H100))[1]
    assert speed["mfu"] == pytest.approx(6 * 1e9 * 2048 / (0.4 * 2 * 989e12))
    assert (speed["updated"], speed["trained"]) == (pytest.approx(1000 / 0.4), pytest.approx(1000 / 1.0))


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (dict(), "the learner ran on a CPU, whose peak is not known"),
        (dict(gpus=["Something New"]), "the peak of Something New is not known"),
        (H100 | dict(at=START + 1e6), "what the learner ran on was not noted"),
    ],
)
def test_the_report_says_why_there_is_no_mfu(write_run: WriteRun, told: dict[str, Any], reason: str) -> None:
    run = write_run(2)
    run_log = noted(run, **told)
    assert f"There is no MFU: {reason}." in throughput_text(run_log)
    assert reason in write_report(run).read_text()
    assert dict(throughput_figures(run_log))["Model FLOPs utilization (MFU)"] is None


def test_the_environment_names_hosts_packages_and_commits_once(write_run: WriteRun) -> None:
    run = write_run(2)
    assert environment_rows(RunLog.read(run)) == []
    noted(run, **H100)
    noted(run, at=START + 50, commit="fedcba987654+", **H100)
    run_log = noted(run, role="engine-0", host="node-b", packages=dict(torch="2.13.0", sglang="0.5.23"))
    assert environment_rows(run_log) == [
        ("Commit", "0123456789ab, then fedcba987654+"),
        ("Host of engine 0", "node-b (no GPU, 16 CPU cores)"),
        ("Host of the learner", "node-a (2 × NVIDIA H100 80GB HBM3, 16 CPU cores)"),
        ("Python", "3.11.9"),
        ("torch", "2.13.0"),
        ("sglang", "0.5.23"),
    ]
    assert "<dt>Host of engine 0</dt><dd>node-b (no GPU, 16 CPU cores)</dd>" in write_report(run).read_text()


def test_a_run_that_noted_nothing_says_so(write_run: WriteRun) -> None:
    assert "Not recorded" in write_report(write_run(0)).read_text()
