"""Points from runs and from JSONL files: what compute a version cost, what R_0 is, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.analysis.scaling import Bounds, Curve, read_curve
from pipeline.config.loader import recipe_from
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import add_recipe
from pipeline.data.store import BatchStore
from pipeline.errors import StoreError
from tests.support.batches import batch_of_rewards


def jsonl(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def recipe_data(root: Path) -> dict[str, Any]:
    return dict(
        run=dict(name="demo", steps=4, root=str(root)),
        model=dict(path="m"),
        task={"name": "sort_digits"},
        learner=dict(tensor_parallel=2),
        rollout=dict(engines=3, tensor_parallel=2),
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four steps; 100, 110, 120, 130 samples; 1,000, 1,100, … tokens; 10 s, 20 s, 30 s, 40 s; evaluated at 0, 2, 4.

    Two learner processes (TP2) and three engines of two accelerators each: eight accelerators.
    """
    directory = RunDirectory(tmp_path / "demo")
    directory.freeze(recipe_from(recipe_data(tmp_path), source="test"))
    event_log = EventLog(directory.path, "learner-000001")
    for step in range(4):
        event_log.event("committed", batch=step, samples=100 + 10 * step, dropped=0)
        event_log.metrics(
            step, num_tokens=1000 + 100 * step, seconds={"wait": 4.0 * (step + 1), "update": 6.0 * (step + 1)}
        )
    for version, value in ((4, 0.75), (0, 0.25), (2, 0.5)):
        event_log.event("evaluated", version=version, pass_at_1=value, pass_at_1_low=value - 0.1)
    return directory.path


@pytest.mark.parametrize(
    ("x", "spent"),
    [
        # Version 2 follows batches 0 and 1, version 4 all four.
        (None, [0, 210, 460]),
        ("tokens", [0, 2100, 4600]),
        # 8 accelerators × (10 + 20) s = 240 s; × 100 s = 800 s.
        ("hours", [0, 240 / 3600, 800 / 3600]),
    ],
)
def test_compute_of_a_run(run: Path, x: str | None, spent: list[float]) -> None:
    curve = read_curve(run, x, None)
    np.testing.assert_allclose(curve.compute, spent)
    np.testing.assert_array_equal(curve.score, [0.25, 0.5, 0.75])
    assert (curve.name, curve.x, curve.y) == ("demo", x or "samples", "pass_at_1")


def test_a_step_trained_again_counts_once(run: Path) -> None:
    EventLog(run, "learner-000001").metrics(3, num_tokens=2000)
    assert read_curve(run, "tokens", None).compute[-1] == 1000 + 1100 + 1200 + 2000


def skip(run: Path, step: int) -> None:
    RunDirectory(run).note_skipped(step)
    EventLog(run, "learner-000002").event("skipped", step=step)


@pytest.mark.parametrize(
    ("x", "spent"),
    [("samples", [0, 210, 460 - 120]), ("tokens", [0, 2100, 4600 - 1200]), ("hours", [0, 1 / 15, 7 / 45])],
)
def test_a_skipped_step_costs_nothing_and_moves_no_version(run: Path, x: str, spent: list[float]) -> None:
    """Step 2 was trained by a learner that was killed; its batch was damaged before the next one read it. Hours: 8
    accelerators × (10 + 20) s = 240 s; × (10 + 20 + 40) s = 560 s."""
    skip(run, 2)
    np.testing.assert_allclose(read_curve(run, x, None).compute, spent)


def test_hours_are_those_of_the_layout_in_which_a_step_was_trained(run: Path) -> None:
    """From step 2 on four learner processes, one engine of two, and a teacher on three: nine accelerators."""
    changed = dict(
        learner=dict(tensor_parallel=4),
        rollout=dict(engines=1, tensor_parallel=2),
        distillation=dict(path="t", tensor_parallel=3),
        advantage=dict(name="grpo", zero_variance="keep"),
    )
    add_recipe(run, recipe_from(recipe_data(run.parent) | changed, source="test"), first_step=2, first_batch=3)
    hours = [0, 8 * 30 / 3600, (8 * 30 + 9 * 70) / 3600]
    np.testing.assert_allclose(read_curve(run, "hours", None).compute, hours)


@pytest.mark.parametrize(
    ("changed", "accelerators"),
    [
        (dict(rollout=dict(engines=2, tensor_parallel=2)), 4 + 4),
        (dict(rollout=dict(engines=2, tensor_parallel=2), weights=dict(channel="ipc")), 4),
        (dict(rollout=dict(engines=3, tensor_parallel=2), weights=dict(channel="ipc")), 6),
        (dict(rollout=dict(engines=2, extra_args=["--pp-size", "2", "--dp=3"])), 4 + 12),
        (dict(rollout=dict(engines=2, urls=["http://a:1", "http://b:1"])), 4 + 2),
    ],
)
def test_hours_count_each_accelerator_once(run: Path, changed: dict[str, Any], accelerators: int) -> None:
    recipe = recipe_from(recipe_data(run.parent) | dict(learner=dict(tensor_parallel=4)) | changed, source="test")
    add_recipe(run, recipe, first_step=2, first_batch=3)
    hours = [0, 8 * 30 / 3600, (8 * 30 + accelerators * 70) / 3600]
    np.testing.assert_allclose(read_curve(run, "hours", None).compute, hours)


def forget(path: Path, **line: Any) -> None:
    """As a killed process, or a host that loses power, leaves a log: without the line that holds these values."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(one for one in lines if not line.items() <= json.loads(one).items()))


def test_a_step_without_a_line_costs_what_nobody_knows(run: Path) -> None:
    forget(run / "metrics/learner-000001.jsonl", step=1)
    with pytest.raises(StoreError, match="version 2 was evaluated, but the tokens of step 1 are in no log"):
        read_curve(run, "tokens", None)
    np.testing.assert_array_equal(read_curve(run, "samples", None).compute, [0, 210, 460])


def test_samples_whose_event_is_lost_are_those_of_the_batch(run: Path) -> None:
    forget(run / "events/learner-000001.jsonl", kind="committed", batch=1)
    with pytest.raises(StoreError, match="version 2 was evaluated, but the samples of step 1 are in no log"):
        read_curve(run, "samples", None)
    path = BatchStore(run / "batches").commit(batch_of_rewards([[1.0, 0.0, 0.5]] * 2, index=1))
    np.testing.assert_array_equal(read_curve(run, "samples", None).compute, [0, 106, 356])
    path.write_bytes(b"damaged")
    with pytest.raises(StoreError, match="the samples of step 1 are in no log"):
        read_curve(run, "samples", None)


def test_jsonl_sorts_and_passes_over_other_lines(tmp_path: Path) -> None:
    lines = [dict(c=3, r=0.3), dict(note="hello"), dict(c=1, r=0.1), dict(c=2, r=None), dict(c=4)]
    curve = read_curve(jsonl(tmp_path / "log.jsonl", lines), "c", "r")
    np.testing.assert_array_equal(curve.compute, [1, 3])
    np.testing.assert_array_equal(curve.score, [0.1, 0.3])


def curve(compute: list[float], score: list[float]) -> Curve:
    return Curve(name="n", x="c", y="r", compute=np.array(compute), score=np.array(score))


def test_the_first_point_of_each_repeat_measures_the_start() -> None:
    repeats = [curve([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4]), curve([0, 1, 2], [0.3, 0.2, 0.3])]
    points = Bounds().points(repeats)
    assert points.start == pytest.approx(0.2)  # the mean of .1 and .3
    assert points.start_weight == 2
    np.testing.assert_array_equal(points.compute, [1, 1, 2, 2, 3])


def test_a_given_start_is_exact_and_leaves_all_points_above_zero() -> None:
    points = Bounds(r0=0.15).points([curve([0, 1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4, 0.5])])
    assert (points.start, points.start_weight, len(points.compute)) == (0.15, math.inf, 4)
    late = Bounds(r0=0.15).points([curve([1, 2, 3, 4], [0.2, 0.3, 0.4, 0.5])])
    assert len(late.compute) == 4
