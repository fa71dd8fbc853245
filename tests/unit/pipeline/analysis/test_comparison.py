from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from launch.show.runs import render_comparison
from pipeline.analysis.comparison import AXES, compare_runs, series
from pipeline.analysis.run_log import RunLog
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from tests.support.written_runs import START, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The second has one step, and lies in a folder whose name would be a tag."""
    root = tmp_path_factory.mktemp("compared")
    moved = write_run(root, 1, name="b", overrides=dict(schedule=dict(kind="async", lag=3)))
    return [write_run(root, 24, name="a"), moved.rename(root / "<b>")]


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return Path(compare_runs(runs, tmp_path_factory.mktemp("page") / "page.html")["page"]).read_text(encoding="utf-8")


def test_the_page_is_one_file_that_fetches_nothing_and_escapes_names(page: str) -> None:
    assert "://" not in page
    assert '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src' in page
    assert not re.search(r"<script|<link|<img|@import|(src|href)=\"(?!#)", page)
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert "schedule.lag" in page
    assert not re.search(r"#fe00\w\w", page)


def test_every_axis_has_curves_and_a_point_says_its_value(runs: list[Path], page: str) -> None:
    for over in AXES:
        assert f'aria-label="reward_mean over {over}"' in page
    assert f"<title>{runs[0]}, 2: 0.22</title>" in page  # two steps trained; step 1 has reward 0.2 + 0.02
    assert f"<title>{runs[0]}, 512: 0.22</title>" in page
    assert page.count("<title>") > 100


def test_places_on_each_axis(runs: list[Path]) -> None:
    run_log = RunLog.read(runs[0])
    assert series(run_log, "reward_mean", "steps")[0][:3] == [1.0, 2.0, 3.0]
    assert series(run_log, "reward_mean", "samples")[0][:3] == [256.0, 512.0, 768.0]
    assert series(run_log, "reward_mean", "seconds")[0][:3] == [12.0, 14.0, 16.0]
    assert series(run_log, "pass_at_1", "steps") == ([0.0, 24.0], [0.125, 0.5])


def test_an_evaluation_after_a_skipped_step_has_its_place(tmp_path: Path) -> None:
    run = write_run(tmp_path, 2)
    RunDirectory(run).note_skipped(2)
    event_log = EventLog(run, "learner-000002")
    event_log.event("skipped", step=2, time=START + 15.0)
    event_log.event("evaluated", version=3, pass_at_1=0.75, time=START + 16.0)
    run_log = RunLog.read(run)
    assert series(run_log, "pass_at_1", "steps") == ([0.0, 2.0, 3.0], [0.125, 0.5, 0.75])
    assert series(run_log, "pass_at_1", "samples")[0] == [0.0, 512.0, 512.0]
    assert series(run_log, "pass_at_1", "seconds")[0] == [0.0, 14.0, 15.0]


def text_of(table: object) -> str:
    console = Console(width=160, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_a_comparison_names_the_keys_that_differ_and_no_other(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, 24, name="a"),
        write_run(tmp_path, 12, name="b", overrides=dict(schedule=dict(kind="async", lag=3))),
    ]
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
