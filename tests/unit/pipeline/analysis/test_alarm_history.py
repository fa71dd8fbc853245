"""Alarms over a run, and how the report tells them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch.show.runs import render
from pipeline.analysis.alarm_history import alarm_history, formats_differ
from pipeline.analysis.guides import reading_of
from pipeline.analysis.html_report import render_page
from pipeline.analysis.run_log import RunLog
from pipeline.analysis.summary import summarize
from pipeline.config.recipe import Recipe
from pipeline.data.run_recipes import add_recipe

WriteRun = Callable[..., Path]


def with_ess(run_log: RunLog, values: dict[int, float]) -> RunLog:
    """The same run with other values of the ESS at some steps, and nothing else out of bounds."""
    calm = [{key: value for key, value in line.items() if key != "mismatch"} for line in run_log.metrics]
    lines = [line | ({"ess": values[line["step"]]} if line["step"] in values else {}) for line in calm]
    return replace(run_log, metrics=lines)


def test_one_entry_a_rule_with_its_steps_and_its_worst(write_run: WriteRun) -> None:
    run_log = with_ess(RunLog.read(write_run(12)), {})
    assert alarm_history(run_log) == []
    ended = alarm_history(with_ess(run_log, {3: 0.25, 4: 0.1, 7: 0.29}))
    assert [(h.first_step, h.last_step, h.num_steps, h.lasts) for h in ended] == [(3, 7, 3, False)]
    assert ended[0].worst.value == 0.1
    assert ended[0].text == "ess low: 0.1 at worst, below 0.3, at 3 of steps 3 to 7"
    assert alarm_history(with_ess(run_log, {11: 0.2}))[0].text.endswith("at step 11, until now")


@pytest.mark.parametrize(("before", "after", "broke"), [("fp8_block", "bf16", (4, 5)), ("bf16", "fp8_block", (0, 3))])
def test_a_fork_in_another_format_leaves_its_parent_s_alarms_as_they_were(
    write_run: WriteRun, before: str, after: str, broke: tuple[int, int]
) -> None:
    path = write_run(0, overrides=dict(rollout=dict(precision=before)))
    recipe = RunLog.read(path).recipe
    rollout = recipe.rollout.model_copy(update=dict(precision=after))
    add_recipe(path, recipe.model_copy(update=dict(rollout=rollout)), first_step=4, first_batch=4)
    lines = [dict(step=step, time=0.0, mismatch={"age": {"0": {"k3_kl": 5e-3}}}) for step in range(6)]
    run_log = replace(RunLog.read(path), metrics=lines)
    (history,) = alarm_history(run_log)
    assert (history.name, history.first_step, history.last_step) == ("fresh kl high", *broke)
    reading = reading_of("KL from engine to learner, nats a token", run_log)
    assert reading is not None
    assert f"beyond its bounds at {broke[1] - broke[0] + 1} of 6 steps" in reading.text
    assert reading.text.endswith("now too." if history.lasts else "not now.")


def test_the_worst_is_the_furthest_beyond_the_bound_of_its_step(write_run: WriteRun) -> None:
    path = write_run(0, overrides=dict(rollout=dict(precision="bf16")))
    recipe = RunLog.read(path).recipe
    rollout = recipe.rollout.model_copy(update=dict(precision="fp8_block"))
    add_recipe(path, recipe.model_copy(update=dict(rollout=rollout)), first_step=1, first_batch=1)
    lines = [dict(step=step, time=0.0, mismatch={"age": {"0": {"k3_kl": kl}}}) for step, kl in ((0, 9e-3), (1, 5.1e-2))]
    (history,) = alarm_history(replace(RunLog.read(path), metrics=lines))
    assert (history.worst.value, history.worst.bound, history.num_steps) == (9e-3, 1e-3, 2)


def test_the_report_lists_them_with_what_to_do(write_run: WriteRun) -> None:
    run_log = with_ess(RunLog.read(write_run(12)), {})
    calm = render_page(run_log)
    assert "No alarm:" in calm
    page = render_page(with_ess(run_log, {3: 0.25, 4: 0.1}))
    assert "<h2>Alarms</h2>" in page
    assert "2 of steps 3 to 4" in page
    assert "The effective sample size was 0.1 at worst, below 0.3." in page
    assert "verl warns below 0.3" in page
    assert "No alarm:" not in page


def test_the_table_of_a_run_has_a_row_for_each(write_run: WriteRun) -> None:
    numbers = summarize(with_ess(RunLog.read(write_run(12)), {3: 0.25}))
    console = Console(width=160, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(render(numbers))
    assert "ess low: 0.25 at worst, below 0.3, at step 3" in capture.get()


@pytest.mark.parametrize(
    ("learner", "rollout", "differ"),
    [
        ({}, dict(precision="fp8_block"), True),
        (dict(fp8_emulation=True), dict(precision="fp8_block"), False),
        (dict(precision="fp8_block"), dict(precision="fp8_block"), False),
        (dict(precision="fp8_delayed"), dict(precision="fp8_block"), True),
        (dict(precision="fp8_block"), dict(precision="bf16"), True),
        ({}, dict(precision="bf16"), False),
    ],
)
def test_when_formats_differ(learner: dict[str, Any], rollout: dict[str, Any], differ: bool) -> None:
    recipe = Recipe.model_validate(
        dict(run=dict(name="x", steps=1), model=dict(path="m"), task=dict(name="sort_digits"))
        | dict(learner=learner, rollout=rollout)
    )
    assert formats_differ(recipe) == differ
