"""What a report says below its figures: the healthy range, this run's number, what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.analysis.guides import GUIDES, reading_of
from pipeline.analysis.html_report import WIDE, sections, write_report
from pipeline.analysis.run_log import RunLog
from pipeline.config.algorithm import CORRECTIONS, OBJECTIVES
from precision.mismatch.alarms import RULES
from tests.support.pages import ROOT

WriteRun = Callable[..., Path]
SPEAKS_FOR_ITSELF = {"", "Response tokens a second", "Timeline of the last steps", "Weight by solve rate"}


@pytest.fixture
def run_log(write_run: WriteRun) -> RunLog:
    return RunLog.read(write_run(4))


def with_values(run_log: RunLog, metric: str, values: list[float]) -> RunLog:
    return replace(run_log, metrics=[{"step": step, metric: value} for step, value in enumerate(values)])


@pytest.mark.parametrize(
    ("title", "metric", "values", "text"),
    [
        ("Effective sample size", "ess", [0.9, 0.8], "Last step 0.8, within its bounds at every step."),
        ("Effective sample size", "ess", [0.9, 0.2], "Last step 0.2; beyond its bounds at 1 of 2 steps, now too."),
        ("Effective sample size", "ess", [0.1, 0.2, 0.3], "Last step 0.3; beyond its bounds at 2 of 3 steps, not now."),
        ("Mean log-ratio, nats", "k1_kl", [-0.2, 0.05], "Last step 0.05; beyond its bounds at 1 of 2 steps, not now."),
        (
            "Gradient norm",
            "grad_norm",
            [1.0] * 20 + [60.0],
            "Last step 60; beyond its bounds at 1 of 21 steps, now too.",
        ),
        (
            "Gradient norm",
            "grad_norm",
            [0.5] * 90 + [500.0] * 10,
            "Last step 500; beyond its bounds at 10 of 100 steps, now too.",
        ),
        ("Gradient norm", "grad_norm", [0.5, 0.5, 6.0], "Last step 6; beyond its bounds at 1 of 3 steps, now too."),
        ("Gradient norm", "grad_norm", [1e-15, 0.0, 0.0, 2.0], "Last step 2, within its bounds at every step."),
        ("Gradient norm", "grad_norm", [0.0, 0.0], "Last step 0, within its bounds at every step."),
        ("Training reward", "reward_mean", [0.1, 0.25], "Last step 0.25."),
        ("Samples without a reward", "verifier_failures", [0.0], "Last step 0, within its bounds at every step."),
        ("Effective sample size", "other", [0.5], ""),
    ],
)
def test_a_reading_tells_the_number_and_whether_it_is_within_its_bounds(
    run_log: RunLog, title: str, metric: str, values: list[float], text: str
) -> None:
    reading = reading_of(title, with_values(run_log, metric, values))
    assert reading is not None
    assert reading.text == text
    assert reading.state == ("beyond" if "beyond" in text else "within" if "within" in text else "")


def test_quantized_rollouts_have_the_wider_bound_of_the_alarm(write_run: WriteRun) -> None:
    fresh: Any = {"step": 0, "mismatch": {"age": {"0": {"k3_kl": 5e-3}}}}
    for precision, state in (("bf16", "beyond"), ("fp8_block", "within")):
        run = RunLog.read(write_run(0, name=precision, overrides=dict(rollout=dict(precision=precision))))
        reading = reading_of("KL from engine to learner, nats a token", replace(run, metrics=[fresh]))
        assert reading is not None
        assert reading.state == state


def test_quantized_rollouts_have_the_wider_bound_of_the_rule_of_thumb(write_run: WriteRun) -> None:
    for precision, state in (("bf16", "beyond"), ("fp8_block", "within")):
        run = RunLog.read(write_run(0, name=precision, overrides=dict(rollout=dict(precision=precision))))
        reading = reading_of("Correlation of the two sides", with_values(run, "logprob_pearson", [0.97]))
        assert reading is not None
        assert reading.state == state


def test_every_alarm_and_every_figure_has_words(run_log: RunLog) -> None:
    assert {rule.name for rule in RULES} == {guide.rule.name for guide in GUIDES if guide.rule is not None}
    explained = {title for guide in GUIDES for title in guide.titles}
    assert len(explained) == sum(len(guide.titles) for guide in GUIDES)
    drawn = {figure["title"] for part in sections(run_log) for figure in part["figures"]}
    own = {m.title for choice in (*OBJECTIVES.values(), *CORRECTIONS.values()) for m in choice.measures}
    wide = set(WIDE) - explained
    assert own - explained == set()
    silent = {title for title in drawn - explained - SPEAKS_FOR_ITSELF - wide if not title.startswith("Held-out")}
    assert silent == set()


def test_words_name_the_bounds_of_the_alarms() -> None:
    for guide in GUIDES:
        if guide.rule is not None:
            said = {float(found) for found in re.findall(r"[\d.]+(?:e-\d+)?", f"{guide.healthy} {guide.closer}")}
            bounds = {guide.rule.bound, guide.rule.bound_if_quantized} - {None}
            assert bounds <= said, guide.look_at


def test_the_page_of_metrics_has_the_same_rows() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    table = page[page.index("| look at |") : page.index("\n\n", page.index("| look at |"))].splitlines()[2:]
    assert table == [f"| {g.look_at} | {g.healthy} | {g.closer} | {g.then} |" for g in GUIDES]


def test_a_figure_beyond_its_bounds_says_what_to_do_without_being_asked(write_run: WriteRun) -> None:
    page = write_report(write_run(2)).read_text()
    within = page.index("Last step 0.998, within its bounds at every step.")
    assert "<details" in page[within - 60 : within]
    assert " open" not in page[page.rindex("<details", 0, within) : within]
    assert "Then: runbook 9: age first, then formats." in page
