from __future__ import annotations

import time
import urllib.request
from pathlib import Path

import pytest

from launch.run.metrics import (
    ALL,
    METRICS,
    METRICS_HOST_VARIABLE,
    METRICS_PORT_VARIABLE,
    RunMetrics,
    metrics_of,
)
from pipeline.data.epochs import claim
from pipeline.data.event_log import EventLog
from pipeline.errors import EvenKeelError
from tests.support.metric_feed import fed, run_with_every_file, scraped
from tests.support.promql import shown


@pytest.mark.parametrize("role", ALL)
def test_a_role_shows_what_the_table_says_and_nothing_else(tmp_path: Path, role: str) -> None:
    found = shown(scraped(fed(role, run_with_every_file(tmp_path))))
    found = {name: labels for name, labels in found.items() if not name.endswith("_created")}
    assert found == {metric.name: {"run", *metric.labels} for metric in METRICS if role in metric.roles}


@pytest.mark.parametrize(
    ("role", "line"),
    [
        ("learner", 'evenkeel_ess_ratio{run="demo"} 0.93'),
        ("learner", 'evenkeel_k1_kl_nats{run="demo"} -0.25'),
        ("learner", 'evenkeel_bucket_ess_ratio{bucket="0",run="demo",split="age"} 0.96'),
        ("learner", 'evenkeel_alarm{alarm="kl_high",run="demo"} 1.0'),
        ("learner", 'evenkeel_alarm_value{alarm="kl_high",run="demo"} 0.25'),
        ("learner", 'evenkeel_alarm{alarm="ess_low",run="demo"} 0.0'),
        ("learner", 'evenkeel_alarm_bound{alarm="fresh_kl_high",run="demo"} 0.05'),
        ("learner", 'evenkeel_last_step_timestamp_seconds{run="demo"} 1000.0'),
        ("learner", 'evenkeel_phase_seconds{phase="wait",run="demo"} 1.0'),
        ("learner", 'evenkeel_publish_phase_seconds{phase="load",run="demo"} 0.25'),
        ("learner", 'evenkeel_steps_left{run="demo"} 2.0'),
        ("learner", 'evenkeel_tokens_total{run="demo"} 640.0'),
        ("learner", 'evenkeel_published_version{run="demo"} 8.0'),
        ("collector", 'evenkeel_engines_quarantined{run="demo"} 1.0'),
        ("collector", 'evenkeel_engine_served_version{engine="0",run="demo"} 8.0'),
        ("collector", 'evenkeel_groups_left_out_total{reason="zero_variance",run="demo"} 2.0'),
        ("collector", 'evenkeel_retries_total{run="demo"} 1.0'),
        ("collector", 'evenkeel_bad_answers_total{engine="1",run="demo"} 1.0'),
        ("collector", 'evenkeel_waiting_prompts{run="demo"} 5.0'),
        ("collector", 'evenkeel_prompts_in_flight{run="demo"} 2.0'),
        ("collector", 'evenkeel_concurrent_prompts{run="demo"} 6.0'),
        ("collector", 'evenkeel_engine_kv_use_ratio{engine="0",run="demo"} 0.75'),
        ("collector", 'evenkeel_retractions_total{run="demo"} 7.0'),
        ("collector", 'evenkeel_fatal{error="NonFiniteError",run="demo"} 1.0'),
        ("supervisor", 'evenkeel_restarts_total{process="engine-1",run="demo"} 1.0'),
        ("supervisor", 'evenkeel_finished{run="demo"} 0.0'),
    ],
)
def test_values(tmp_path: Path, role: str, line: str) -> None:
    shown_lines = {_sorted_labels(text) for text in scraped(fed(role, run_with_every_file(tmp_path))).splitlines()}
    assert _sorted_labels(line) in shown_lines


def test_a_bucket_that_a_step_lacks_is_shown_no_more(tmp_path: Path) -> None:
    metrics = fed("learner", run_with_every_file(tmp_path))
    metrics.observe("metrics", dict(step=8, ess=0.2, mismatch={"age": {"3-4": dict(share=1.0, ess=0.2)}}))
    text = scraped(metrics)
    assert 'bucket="0"' not in text
    assert 'evenkeel_bucket_ess_ratio{bucket="3-4"' in text
    assert 'evenkeel_alarm_value{alarm="kl_high"' not in text
    assert 'evenkeel_alarm{alarm="kl_high",run="demo"} 0.0' in text
    assert 'evenkeel_alarm{alarm="ess_low",run="demo"} 1.0' in text


@pytest.mark.parametrize(
    ("role", "name"),
    [("learner", "evenkeel_last_step_timestamp_seconds"), ("collector", "evenkeel_last_batch_timestamp_seconds")],
)
def test_a_start_that_does_nothing_hides_no_standstill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, name: str
) -> None:
    """A learner that dies before its first step, each time that it is started again."""

    def shown_now() -> float:
        (line,) = (line for line in scraped(RunMetrics(role, run)).splitlines() if line.startswith(f"{name}{{"))
        return float(line.rpartition(" ")[2])

    run = run_with_every_file(tmp_path)
    before = time.time()
    assert shown_now() >= before, "nothing is done yet: the process has started"
    with monkeypatch.context() as patch:
        for start, second in enumerate((1000.0, 2000.0), 1):
            log = EventLog(run, f"{role}-{start:06d}")
            patch.setattr("pipeline.data.event_log.time.time", lambda second=second: second)
            log.metrics(start, ess=1.0)
            log.event("committed", batch=start, samples=8)
            log.event("retried", group=start)
        patch.setattr("pipeline.data.event_log.time.time", lambda: 3000.0)
        EventLog(run, "supervisor-000003").event("started", process=role)
    (run / "metrics" / f"{role}-000003.jsonl").write_text('{"step": 3, "ti')
    assert shown_now() == 2000.0, "nobody has started since"
    with monkeypatch.context() as patch:
        for second in (900.0, 9000.0, 9100.0):
            patch.setattr("pipeline.data.epochs.time.time", lambda second=second: second)
            claim(run, role)
    assert shown_now() == 9000.0, "the run stood still until then, and has done nothing since"


def test_prometheus_reads_it_over_http(tmp_path: Path) -> None:
    metrics = fed("learner", run_with_every_file(tmp_path))
    port = metrics.serve(0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert "evenkeel_ess_ratio" in shown(answer.read().decode())


def test_the_environment_says_whether_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (METRICS_PORT_VARIABLE, METRICS_HOST_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert metrics_of("learner", tmp_path) is None
    monkeypatch.setenv(METRICS_PORT_VARIABLE, "0")
    metrics = metrics_of("learner", tmp_path)
    assert metrics is not None
    assert metrics.role == "learner"
    monkeypatch.setenv(METRICS_PORT_VARIABLE, "http")
    with pytest.raises(EvenKeelError, match="'http', expected a port"):
        metrics_of("learner", tmp_path)


def _sorted_labels(line: str) -> str:
    name, brace, rest = line.partition("{")
    if not brace:
        return line
    labels, _, value = rest.rpartition("}")
    return f"{name}{{{','.join(sorted(labels.split(',')))}}}{value}"
