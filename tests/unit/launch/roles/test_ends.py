"""How roles end when they are asked to early, or were given what cannot be."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.roles import lifecycle
from launch.roles.collector import collect, run_collector
from launch.roles.commands import role_app
from launch.run.waiting import Stop, wait_for
from pipeline.config.recipe import Recipe
from pipeline.data.epochs import claim
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import FATAL_EXIT_CODE, RecipeError, StoppedError
from tests.support.runs import make_prompts


@pytest.mark.parametrize("role", ["learner", "collector"])
def test_a_wrong_host_is_fatal_also_where_metrics_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(lifecycle, "end_process", end)
    monkeypatch.setattr(Stop, "install", lambda stop: stop)
    argv = [role, str(tmp_path), "--host", "203.0.113.7", "--metrics-port", "9000"]
    result = CliRunner().invoke(role_app, argv)
    assert result.exit_code == FATAL_EXIT_CODE
    assert "no address of this machine" in result.stderr


@pytest.mark.parametrize("said", ["2m", "nan", "-1", "inf"])
def test_a_grace_that_is_no_time_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(lifecycle, "end_process", ended.append)
    monkeypatch.setattr(Stop, "install", lambda stop: stop)
    monkeypatch.setenv("EVENKEEL_GRACE_S", said)
    lifecycle.run_role(RunDirectory(tmp_path), "collector", lambda _: pytest.fail("works"))
    assert ended == [FATAL_EXIT_CODE]
    assert f"EVENKEEL_GRACE_S is '{said}', expected seconds from 0 to 86400" in capsys.readouterr().err


def asked() -> Stop:
    stop = Stop()
    stop.asked = True
    return stop


def test_who_was_asked_to_end_does_not_go_on_with_what_is_there() -> None:
    with pytest.raises(StoppedError):
        wait_for(asked(), lambda: True, "nothing", 60)


def test_a_collector_that_was_asked_before_it_collects_does_not_begin(tmp_path: Path) -> None:
    epoch = claim(tmp_path, "collector")
    with pytest.raises(StoppedError):  # and not that there is no recipe
        asyncio.run(collect(RunDirectory(tmp_path), epoch, asked().check))


def test_a_reward_that_cannot_be_imported_is_said_before_engines_are_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(tmp_path / "prompts.jsonl")
    data = dict(
        run=dict(name="x", root=str(tmp_path), steps=1),
        model=dict(path="m"),
        task=dict(name="data", path=str(prompts), reward="nowhere.at_all:reward"),
        rollout=dict(start_deadline_s=600.0),
        evaluation=dict(prompts=1),
        reward=dict(sandbox="none"),
    )
    run = RunDirectory(tmp_path / "x")
    run.freeze(Recipe.model_validate(data))
    monkeypatch.setattr("launch.roles.collector.wait_for_policy", lambda *_: pytest.fail("it waits"))
    with pytest.raises(RecipeError, match=r"reward 'nowhere.at_all:reward' cannot be imported"):
        run_collector(run, Stop())
