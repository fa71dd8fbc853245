"""Decisions of the controller on the report and in the live view."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.run.live_view import event_line
from pipeline.analysis.figures.control import control_figures, control_text, decisions
from pipeline.analysis.run_log import RunLog
from pipeline.config.loader import recipe_from
from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.run_directory import unfenced
from precision.controller.records import Decision, Evidence, State

RECIPE = dict(run=dict(name="x", steps=9), model=dict(path="m"), task=dict(name="sort_digits"))
CLIMB = Decision(action="climb", cause="quantization", rung="1 groups promoted", groups=("a",), because="ESS 0.9.")


@pytest.fixture
def run_log(tmp_path: Path) -> RunLog:
    files = ControlFiles(tmp_path / "control", unfenced)
    for step in range(6):
        decision = CLIMB if step == 3 else None
        files.create(ControlRecord(step=step, evidence=Evidence(step=step, loss=0.1), state=State(), decision=decision))
    recipe = recipe_from(RECIPE | dict(controller=dict(ess_floor=0.97)), source="t")
    metrics = [dict(step=step, time=0.0, ess=0.9 + step / 100) for step in range(6)]
    return RunLog(run_dir=tmp_path, recipe=recipe, metrics=metrics, events=[])


def test_each_decision_is_marked_and_explained(run_log: RunLog) -> None:
    assert [record.step for record in decisions(run_log)] == [3]
    assert control_text(run_log) == "(1) After step 3: 1 groups promoted. ESS 0.9."
    ((_, svg),) = control_figures(run_log)
    assert svg is not None
    assert ">1<" in svg
    assert "floor" in svg


def test_without_a_controller_there_is_nothing(run_log: RunLog) -> None:
    plain = RunLog(run_dir=run_log.run_dir, recipe=recipe_from(RECIPE, source="t"), metrics=run_log.metrics, events=[])
    assert (control_text(plain), control_figures(plain), decisions(plain)) == ("", [], [])


def test_the_live_view_says_it() -> None:
    event = dict(kind="controlled", step=3, **CLIMB.model_dump(exclude_none=True))
    assert event_line(event) == "controller after step 3: 1 groups promoted. ESS 0.9."
