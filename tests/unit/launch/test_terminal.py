"""Lines where there is no terminal: nobody waits in silence, and nobody is flooded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from launch import terminal as progress
from launch.cli import app
from launch.terminal import check_recipe_or_run, counted, going_on, is_due, note_line
from pipeline.errors import RecipeError


@pytest.mark.parametrize(
    ("steps", "passed_s", "due"),
    [
        (0, 9.9, False),
        (0, 10.0, True),
        (1, 2.0, False),
        (1, 2.1, True),
        (3, 6.0, False),
        (3, 6.1, True),
        (9, 8.9, False),
        (9, 9.1, True),
    ],
)
def test_a_line_is_due_every_ten_seconds_and_with_each_slow_step(steps: int, passed_s: float, due: bool) -> None:
    assert is_due(steps, passed_s) == due


def test_a_block_that_says_nothing_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a command what was before it counts: short blocks one after the other make a long silence."""
    monkeypatch.setattr(progress, "EVERY_S", 0.4)
    monkeypatch.setattr(progress, "is_command", True)
    note_line()
    for what in ("checking", "copying", "hashing"):
        with going_on(what):
            time.sleep(0.3)
    said = capsys.readouterr()
    assert said.out == ""
    assert set(said.err.splitlines()) & {"note: copying (0 s)", "note: hashing (0 s)"}


def test_a_block_of_a_long_process_begins_a_silence_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook has been idle, not silent."""
    monkeypatch.setattr(progress, "is_command", False)  # whatever command another test gave in this process
    monkeypatch.setattr(progress, "line_at", time.monotonic() - 3600)
    with going_on("checking"):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_counts_and_remarks_are_in_the_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SLOW_S", 0.0)
    with counted("sft", 20) as show:
        show(0, "the learner starts")
        show(1, "loss 0.5")
        show(1, "loss 0.5")
    assert capsys.readouterr().err.splitlines() == ["sft 1/20 loss 0.5 (0 s)"]


def test_a_folder_of_its_name_does_not_hide_a_shipped_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("demo", "mine"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    check_recipe_or_run(Path("demo"))
    with pytest.raises(RecipeError, match="mine: no recipe and no run directory of that name"):
        check_recipe_or_run(Path("mine"))


GRPO = str(Path(__file__).parents[3] / "pipeline" / "recipes" / "grpo_32b.yaml")


def test_a_clip_that_cannot_act_is_told_on_stderr() -> None:
    result = CliRunner().invoke(app, ["recipe", GRPO, "--set", "learner.updates_per_batch=1"])
    assert result.stderr.splitlines()[1].startswith("warning: the clip of objective clipped never acts")
    assert yaml.safe_load(result.stdout)["learner"]["updates_per_batch"] == 1
