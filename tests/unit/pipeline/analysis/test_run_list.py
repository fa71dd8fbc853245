from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from launch.show.runs import render_comparison, render_list
from pipeline.analysis.run_list import compare_runs, list_runs
from pipeline.errors import RecipeError, StoreError

WriteRun = Callable[..., Path]


def text_of(table: object) -> str:
    console = Console(width=160, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_runs_of_a_folder_by_name_and_nothing_else(write_run: WriteRun, tmp_path: Path) -> None:
    write_run(24, name="b")
    write_run(3, name="a")
    (tmp_path / "models").mkdir()
    (tmp_path / "notes.txt").write_text("not a run")
    found = list_runs(tmp_path)
    assert [(Path(run["path"]).name, run["steps"]) for run in found] == [("a", 3), ("b", 24)]
    json.dumps(found, allow_nan=False)
    told = text_of(render_list(tmp_path, found))
    assert "unfinished: 3 of 24 steps" in told
    assert "12.5 % → 50.0 %" in told


def test_an_unreadable_run_says_why_and_hides_no_other(write_run: WriteRun, tmp_path: Path) -> None:
    broken = write_run(3, name="broken")
    write_run(24, name="good")
    (broken / "recipe.yaml").write_text("task: [")
    first, second = list_runs(tmp_path)
    assert set(first) == {"path", "error"}
    assert second["state"] == "finished"
    assert "broken" in text_of(render_list(tmp_path, [first, second]))


def test_a_run_that_has_not_begun_has_a_row(write_run: WriteRun, tmp_path: Path) -> None:
    write_run(0)
    assert "not started" in text_of(render_list(tmp_path, list_runs(tmp_path)))


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is no folder; give the one that holds runs"):
        list_runs(tmp_path / "missing")


def test_a_comparison_names_the_keys_that_differ_and_no_other(write_run: WriteRun) -> None:
    runs = [write_run(24, name="a"), write_run(12, name="b", overrides=dict(schedule=dict(kind="async", lag=3)))]
    compared = compare_runs(runs)
    assert [run["steps"] for run in compared["runs"]] == [24, 12]
    assert compared["recipe"]["schedule.kind"] == ["sync", "async"]
    assert compared["recipe"]["schedule.lag"][1] == 3
    assert not [key for key in compared["recipe"] if key.startswith(("learner.", "task.", "model."))]
    json.dumps(compared, allow_nan=False)
    told = text_of(render_comparison(compared))
    assert "24 of 24" in told
    assert "12 of 24" in told
    assert "schedule.lag" in told
    assert "bottleneck" not in told  # both say the same


def test_a_comparison_of_equal_runs_says_so(write_run: WriteRun) -> None:
    compared = compare_runs([write_run(3, name="a"), write_run(3, name="b")])
    compared["recipe"] = {}  # their names
    assert "2 runs, which differ in nothing" in text_of(render_comparison(compared))


def test_a_comparison_keeps_the_order_of_its_runs(write_run: WriteRun) -> None:
    first, second = write_run(24, name="z"), write_run(24, name="a")
    assert [run["name"] for run in compare_runs([first, second])["runs"]] == ["z", "a"]


def test_one_run_or_one_twice_is_refused(write_run: WriteRun) -> None:
    run = write_run(3)
    with pytest.raises(RecipeError, match="1 run was given, expected at least two"):
        compare_runs([run])
    with pytest.raises(RecipeError, match="given twice"):
        compare_runs([run, run / ".." / run.name])
