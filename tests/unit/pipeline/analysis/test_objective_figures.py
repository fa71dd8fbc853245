"""Whatever a recipe learns with, its report renders and shows what objective, correction and advantage measured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from launch.build.components import build_objective
from pipeline.advantages.methods import Advantage, Groups, Power, Rewards
from pipeline.analysis.figures import objective
from pipeline.analysis.html_report import render_page
from pipeline.analysis.run_log import RunLog
from pipeline.analysis.summary import summarize
from pipeline.config.algorithm import ADVANTAGES, CORRECTIONS, OBJECTIVES
from pipeline.config.recipe import Recipe
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from precision.settings import Measure
from tests.support.objective_runs import run
from tests.support.own_class import EXAMPLE, SECTION
from tests.support.scored_steps import scored_step

WriteRun = Callable[..., Path]

OLD_ANCHOR = dict(name="clipped", anchor="old")
COMBINATIONS: list[dict[str, dict[str, Any]]] = [
    dict(objective=dict(name="p3o"), advantage=dict(name="grpo")),
    dict(objective=dict(name="p3o", ess_unit="sequence"), advantage=dict(name="rloo", batch_normalized=True)),
    dict(objective=dict(name="p4o"), advantage=dict(name="asym_grpo")),
    dict(objective=OLD_ANCHOR | dict(dual_clip=2.0), correction=dict(name="tis"), advantage=dict(name="fade")),
    dict(objective=OLD_ANCHOR, correction=dict(name="mis"), advantage=dict(name="maxrl", aggregation="sequence")),
    dict(objective=OLD_ANCHOR, correction=dict(name="icepop"), advantage=dict(name="power", delta=0.5)),
    dict(objective=dict(name="gspo", anchor="old"), correction=dict(name="rejection")),
    dict(objective=dict(name="cispo"), correction=dict(name="opsm"), advantage=dict(name="dr_grpo")),
    dict(objective=dict(name="mu_grpo"), advantage=dict(name="f_grpo", zero_variance="skip")),
    dict(objective=dict(name="decoupled"), advantage=dict(name="pass_at_k", k=7)),
    dict(objective=dict(name="m2po"), advantage=dict(name="rloo", aggregation="constant")),
    dict(objective=dict(name="dppo_tv")),
    dict(objective=dict(name="topr"), advantage=dict(name="dr_grpo", aggregation="prompt")),
]
COMBINATIONS += [
    dict(objective=dict(name=name))
    for name in OBJECTIVES
    if all(sections["objective"]["name"] != name for sections in COMBINATIONS)
]
"""Every objective is among them."""

NOT_DRAWN = {"clip_hits", "k3", "kl"}
"""The sum of two that are drawn, and what the page shows as k3 KL."""


def names(values: dict[str, dict[str, Any]]) -> str:
    return "-".join(section["name"] for section in values.values())


def measured_by(recipe: Recipe) -> dict[str, float]:
    """What a real step writes: two responses with ratios far from 1."""
    step = scored_step([[0.3, -0.8, 1.1], [0.9, -1.4]], [1.0, -1.0], old=[[0.2, -0.5, 0.9], [0.8, -1.2]])
    outcome = run(build_objective(recipe), step)
    estimator = recipe.advantage.estimator()
    estimator.observe(solve_rate=0.4, entropy=1.5)
    sums = {name: value / 5 for name, value in outcome.sums.items()}
    return sums | dict(outcome.prepared.measured) | estimator.measured()


@pytest.mark.parametrize("sections", COMBINATIONS, ids=names)
def test_every_choice_renders_and_leaves_no_measure_out(write_run: WriteRun, sections: dict[str, Any]) -> None:
    path = write_run(0, overrides=sections)
    measured = measured_by(RunDirectory(path).recipe())
    for step in range(2):
        EventLog(path, "learner-000001").metrics(step, solve_rate=0.4, entropy=1.5, **measured)
    run_log = RunLog.read(path)
    page = render_page(run_log)
    assert 'aria-label="weight_curves"' in page
    shown = measures_of(run_log.recipe)
    drawn = {metric for measure in shown if f'aria-label="{escape(measure.title)}"' in page for metric in keys(measure)}
    assert set(measured) - NOT_DRAWN <= drawn
    assert summarize(run_log)["objective"].startswith(sections["objective"]["name"])
    assert sections.get("correction", dict(name="none"))["name"] in page


def measures_of(recipe: Recipe) -> list[Measure]:
    return [*recipe.objective.measures, *recipe.correction.measures, *recipe.advantage.measures]


def keys(measure: Measure) -> list[str]:
    return [metric for metric, _, _ in measure.lines]


def test_every_drawn_metric_is_one_that_something_measures(write_run: WriteRun) -> None:
    """Otherwise a renamed measure would leave the page silently."""
    measured = {"solve_rate", "entropy"}
    for number, sections in enumerate(COMBINATIONS):
        measured |= set(measured_by(RunDirectory(write_run(0, name=f"r{number}", overrides=sections)).recipe()))
    everything = (*OBJECTIVES.values(), *CORRECTIONS.values(), *ADVANTAGES.values())
    assert {metric for choice in everything for measure in choice.measures for metric in keys(measure)} <= measured


def test_fade_is_drawn_as_the_power_that_it_was_last(write_run: WriteRun) -> None:
    path = write_run(3, overrides=dict(advantage=dict(name="fade")))
    EventLog(path, "learner-000001").metrics(3, advantage_alpha=2.0, advantage_delta=0.5)
    EventLog(path, "learner-000001").metrics(4, advantage_alpha=2.5, advantage_delta=0.75)
    run_log = RunLog.read(path)
    assert run_log.recipe.advantage.at_last(run_log.last) == Power(alpha=2.5, delta=0.75)
    assert "newest alpha and delta" in objective.advantage_text(run_log)
    svg = str(objective.weight_curve_points(run_log))
    assert ">successes</text>" in svg
    assert ">failures</text>" in svg


def test_a_symmetric_advantage_has_one_line_and_no_schedule(write_run: WriteRun) -> None:
    run_log = RunLog.read(write_run(3, overrides=dict(advantage=dict(name="maxrl"), rollout=dict(group_size=4))))
    svg = str(objective.weight_curve_points(run_log))
    assert ">both</text>" in svg
    assert ">failures</text>" not in svg
    assert "groups of 4." in objective.advantage_text(run_log)
    assert [title for title, _ in objective.advantage_figures(run_log)] == ["Weight by solve rate"]


@pytest.mark.parametrize(("coefficient", "titles"), [(0.0, []), (1.0, ["Weight by solve rate"])])
def test_where_a_teacher_judges_alone_no_prompt_is_weighed_by_its_solve_rate(
    write_run: WriteRun, coefficient: float, titles: list[str]
) -> None:
    overrides = dict(distillation=dict(path="t", reward_coefficient=coefficient), objective=dict(name="cispo"))
    run_log = RunLog.read(write_run(3, overrides=overrides))
    assert [title for title, _ in objective.advantage_figures(run_log)] == titles
    assert ("Weight by solve rate" in render_page(run_log)) == bool(titles)


def test_a_user_s_own_class_has_its_name_and_its_figure(
    write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_objectives.py").write_text(EXAMPLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_objectives", raising=False)
    path = write_run(3, overrides=SECTION)
    EventLog(path, "learner-000001").metrics(3, weight=1.25)
    history = RunLog.read(path)
    assert summarize(history)["objective"] == "soft_cap (cap 3.0)"
    page = render_page(history)
    assert 'aria-label="Mean weight"' in page
    assert "soft_cap (cap 3.0)" in page


class Halves(Advantage):
    """An advantage that states no closed form of its weights."""

    name: Literal["halves"] = "halves"

    def advantages(self, reward: Rewards, group: Groups) -> Rewards:
        return (reward - 0.5 + 0.0 * group).astype(np.float32)


def test_an_advantage_without_a_closed_form_is_drawn_for_the_run_s_groups(write_run: WriteRun) -> None:
    history = RunLog.read(write_run(3, overrides=dict(advantage={"class": f"{__name__}:Halves"})))
    svg = str(objective.weight_curve_points(history))
    assert ">successes</text>" in svg
    assert ">failures</text>" in svg
