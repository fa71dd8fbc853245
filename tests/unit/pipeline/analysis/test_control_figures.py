"""Decisions of the controller on the report and in the live view."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.run.live_view import event_line
from pipeline.analysis.figures.control import control_figures, control_text, decisions, floors
from pipeline.analysis.run_log import RunLog
from pipeline.config.loader import recipe_from
from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.run_directory import unfenced
from pipeline.data.run_recipes import RecipeInForce
from precision.controller.records import Decision, Evidence, State

RECIPE = dict(run=dict(name="x", steps=9), model=dict(path="m"), task=dict(name="sort_digits"))
CLIMB = Decision(action="climb", cause="quantization", rung="1 groups promoted", groups=("a",), because="ESS 0.9.")


def in_force(sections: dict[str, Any], first_step: int = 0) -> RecipeInForce:
    recipe = recipe_from(RECIPE | sections, source="t")
    return RecipeInForce(first_step=first_step, first_batch=first_step, recipe=recipe, path=Path("r"))


@pytest.fixture
def run_log(tmp_path: Path) -> RunLog:
    files = ControlFiles(tmp_path / "control", unfenced)
    for step in range(6):
        decision = CLIMB if step == 3 else None
        files.create(ControlRecord(step=step, evidence=Evidence(step=step, loss=0.1), state=State(), decision=decision))
    metrics = [dict(step=step, time=0.0, ess=0.9 + step / 100) for step in range(6)]
    recipes = [in_force(dict(controller=dict(ess_floor=0.97)))]
    return RunLog(run_dir=tmp_path, recipes=recipes, metrics=metrics, events=[])


def test_each_decision_is_marked_and_explained(run_log: RunLog) -> None:
    assert [record.step for record in decisions(run_log)] == [3]
    assert control_text(run_log) == "(1) After step 3: 1 groups promoted. ESS 0.9."
    ((_, svg),) = control_figures(run_log)
    assert svg is not None
    assert ">1<" in svg
    assert "floor" in svg


def test_without_a_controller_there_is_nothing(run_log: RunLog) -> None:
    plain = replace(run_log, recipes=[in_force({})])
    assert (control_text(plain), control_figures(plain), decisions(plain)) == ("", [], [])


def test_each_step_has_the_floor_of_its_own_recipe(run_log: RunLog) -> None:
    steps = [*range(6)]
    assert floors(run_log, steps) == [(0.97, 0, 5)]
    another = [in_force(dict(controller=dict(ess_floor=floor)), first) for floor, first in ((0.97, 0), (0.5, 4))]
    assert floors(replace(run_log, recipes=another), steps) == [(0.97, 0, 3), (0.5, 4, 5)]
    added = replace(run_log, recipes=[in_force({}), in_force(dict(controller=dict(ess_floor=0.5)), 4)])
    assert floors(added, steps) == [(0.5, 4, 5)]
    left_out = replace(run_log, recipes=[run_log.recipes[0], in_force({}, 4)])
    assert floors(left_out, steps) == [(0.97, 0, 3)]
    assert control_text(left_out) == control_text(run_log)
    assert all(len(control_figures(one)) == 1 for one in (added, left_out))


def test_the_live_view_says_it() -> None:
    event = dict(kind="controlled", step=3, **CLIMB.model_dump(exclude_none=True))
    assert event_line(event) == "controller after step 3: 1 groups promoted. ESS 0.9."
