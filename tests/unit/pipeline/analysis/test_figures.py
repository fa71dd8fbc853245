"""The figures of a report: rewards, mismatch, controller, weights by solve rate, speeds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.advantages.methods import Power
from pipeline.analysis.figures import LAST_STEPS, Section, floors, mean_by_bucket, sections, speeds
from pipeline.analysis.report import render_page
from pipeline.analysis.run_log import RunLog
from pipeline.config.loader import recipe_from
from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import unfenced
from pipeline.data.run_recipes import RecipeInForce
from pipeline.data.store import BatchStore
from precision.controller.policy import Decision, Evidence, State
from tests.support.batches import batch_of_rewards
from tests.support.written_runs import START, write_run

WriteRun = Callable[..., Path]


def section(run_log: RunLog, title: str) -> Section | None:
    return next((part for part in sections(run_log) if part.title == title), None)


def drawn(run_log: RunLog) -> dict[str, str]:
    """Title → svg of every figure."""
    return {figure.title: figure.svg for part in sections(run_log) for figure in part.figures}


def test_fade_is_drawn_as_the_power_that_it_was_last(write_run: WriteRun) -> None:
    path = write_run(3, overrides=dict(advantage=dict(name="fade")))
    EventLog(path, "learner-000001").metrics(3, advantage_alpha=2.0, advantage_delta=0.5)
    EventLog(path, "learner-000001").metrics(4, advantage_alpha=2.5, advantage_delta=0.75)
    run_log = RunLog.read(path)
    svg = drawn(run_log)["Weight by solve rate"]
    power = run_log.recipe.model_copy(update=dict(advantage=Power(alpha=2.5, delta=0.75)))
    fixed = replace(run_log, recipes=[replace(run_log.recipes[-1], recipe=power)])
    assert svg == drawn(fixed)["Weight by solve rate"]
    assert ">successes</text>" in svg
    assert ">failures</text>" in svg


def with_batches(path: Path, *rewards: list[list[float]]) -> list[str]:
    """The titles in the histogram of a run that has these batches."""
    store = BatchStore(path / "batches")
    for index, each in enumerate(rewards):
        store.commit(batch_of_rewards(each, index=index))
    return re.findall(r"<title>([^<]*)</title>", drawn(RunLog.read(path))["Rewards of the samples"])


def test_rewards_of_the_first_middle_and_newest_trained_batch_are_counted(write_run: WriteRun) -> None:
    batches = [[[0.0, 1.0], [0.0, 0.0]], [[1.0, 1.0]], [[0.5, 1.0]], [[0.0, 0.0]]]
    titles = with_batches(write_run(3), *batches)  # batch 3 is not trained yet
    assert {"batch 0, reward 0: 0.75", "batch 0, reward 1: 0.25", "batch 2, reward 0.5: 0.5"} <= set(titles)
    assert not any("batch 3" in title for title in titles)


def test_episodes_are_drawn_where_there_are_some(write_run: WriteRun) -> None:
    path = write_run(2)
    assert section(RunLog.read(path), "Episodes") is None
    for step, late in ((2, 0.0), (3, 0.25)):
        stopped = dict(finished=1.0 - late, turns=0.0, wall_clock=late)
        of = dict(turns_mean=2.0 + step, tool_calls_mean=1.5, rows_mean=1.0, tool_s_mean=0.5, stopped=stopped)
        EventLog(path, "learner-000001").metrics(step, episodes=of)
    found = drawn(RunLog.read(path))
    titles = re.findall(r"<title>([^<]*)</title>", found["Turns and tool calls of an episode"])
    assert {"turns, 2: 4", "turns, 3: 5", "tool calls, 3: 1.5"} <= set(titles)
    titles = re.findall(r"<title>([^<]*)</title>", found["Episodes that did not finish, by reason"])
    assert titles == ["wall clock, 2: 0", "wall clock, 3: 0.25"], "a reason that never came is not drawn"


def test_what_was_issued_is_drawn_beside_what_is_trained(write_run: WriteRun) -> None:
    path = write_run(2)
    title = "{}: issued and trained (median, and 10 to 90 % of the tokens)"
    lengths, rewards = title.format("Lengths of answers, tokens"), title.format("Rewards of groups")
    assert not {lengths, rewards} & drawn(RunLog.read(path)).keys(), "nothing was compared"
    for step in (2, 3):
        sides = {f"{side}_length_p{at}": 7.0 + at for side in ("issued", "trained") for at in (10, 50, 90)}
        EventLog(path, "learner-000001").metrics(step, **sides | dict(trained_length_p50=17.0 + step))
    found = drawn(RunLog.read(path))
    titles = re.findall(r"<title>([^<]*)</title>", found[lengths])
    assert titles == ["issued, 2: 57", "issued, 3: 57", "trained, 2: 19", "trained, 3: 20"]
    assert rewards not in found, "no sample had a reward"


def test_buckets_are_means_over_the_tokens_of_the_last_steps(write_run: WriteRun) -> None:
    def line(step: int, tokens: int, fresh: float, gap: float) -> dict[str, object]:
        cell = dict(share=fresh, ess=1 - gap)
        ages = {"0": cell} | ({"1": cell | dict(share=1 - fresh)} if fresh < 1 else {})
        return dict(step=step, num_tokens=tokens, mismatch={"age": ages})

    lines = [line(0, 10**9, 1.0, 0.9), *(line(step, 100, 1.0, 0.1) for step in range(1, LAST_STEPS))]
    run_log = replace(RunLog.read(write_run(1)), metrics=[*lines, line(LAST_STEPS, 300, 0.5, 0.3)])
    fresh, old = mean_by_bucket(run_log)
    tokens = 100 * (LAST_STEPS - 1)
    gap = (0.1 * tokens + 0.3 * 150) / (tokens + 150)
    assert fresh == ("age", "0", pytest.approx((tokens + 150) / (tokens + 300)), pytest.approx(1 - gap))
    assert (old[1], old[3]) == ("1", pytest.approx(0.7))


RECIPE = dict(run=dict(name="x", steps=9), model=dict(path="m"), task=dict(name="sort_digits"))
CLIMB = Decision(action="climb", cause="quantization", rung="1 groups promoted", groups=("a",), because="ESS 0.9.")


def in_force(parts: dict[str, Any], first_step: int = 0) -> RecipeInForce:
    recipe = recipe_from(RECIPE | parts, source="t")
    return RecipeInForce(first_step=first_step, first_batch=first_step, recipe=recipe, path=Path("r"))


@pytest.fixture
def controlled(tmp_path: Path) -> RunLog:
    files = ControlFiles(tmp_path / "control", unfenced)
    for step in range(6):
        decision = CLIMB if step == 3 else None
        files.create(ControlRecord(step=step, evidence=Evidence(step=step, loss=0.1), state=State(), decision=decision))
    metrics = [dict(step=step, time=0.0, ess=0.9 + step / 100) for step in range(6)]
    recipes = [in_force(dict(controller=dict(ess_floor=0.97)))]
    return RunLog(run_dir=tmp_path, recipes=recipes, metrics=metrics, events=[])


def test_each_step_has_the_floor_of_its_own_recipe(controlled: RunLog) -> None:
    steps = [*range(6)]
    assert floors(controlled, steps) == [(0.97, 0, 5)]
    another = [in_force(dict(controller=dict(ess_floor=floor)), first) for floor, first in ((0.97, 0), (0.5, 4))]
    assert floors(replace(controlled, recipes=another), steps) == [(0.97, 0, 3), (0.5, 4, 5)]
    added = replace(controlled, recipes=[in_force({}), in_force(dict(controller=dict(ess_floor=0.5)), 4)])
    assert floors(added, steps) == [(0.5, 4, 5)]
    left_out = replace(controlled, recipes=[controlled.recipes[0], in_force({}, 4)])
    assert floors(left_out, steps) == [(0.97, 0, 3)]
    assert all(section(one, "Controller") is not None for one in (added, left_out))


H100 = dict(gpus=["NVIDIA H100 80GB HBM3"] * 2, peak_tflops=989.0)


def noted(path: Path, at: float = START, **others: Any) -> RunLog:
    told = dict(host="node-a", cores=16, gpus=[], python="3.11.9", packages={}, ranks=2, active_parameters=10**9)
    EventLog(path, "learner-000009").event("environment", role="learner", time=at, **{**told, **others})
    return RunLog.read(path)


def test_speeds_by_hand(write_run: WriteRun) -> None:
    speed = speeds(RunLog.read(write_run(3)))[2]
    assert speed["generated"] == pytest.approx(256 * 7.75 / 1.0)  # samples · mean length ÷ seconds of generating
    assert speed["updated"] == pytest.approx(2000 / 0.6)
    assert speed["trained"] == pytest.approx(2000 / 2.0)
    assert speed["mfu"] is None


def test_batches_that_are_generated_together_share_the_time(write_run: WriteRun) -> None:
    """Three batches from second 100 on; the engines make 1,000 tokens a second all the while. The second batch is done
    before the first, as its answers are short; a fourth is begun after a pause."""
    run = write_run(0)
    log = EventLog(run, "collector-000002")
    for batch, started, done, samples in (
        (0, 100, 105, 200),
        (1, 100, 103, 300),
        (2, 100, 110, 500),
        (3, 120, 122, 200),
    ):
        seconds = dict(generate=float(done - started), hold=1.0)
        log.event("committed", batch=batch, samples=samples, started=float(started), seconds=seconds)
        log.metrics(batch, num_tokens=10, response_tokens_mean=10.0, seconds=dict(update=1.0))
    assert [line["generated"] for line in speeds(RunLog.read(run))] == pytest.approx([1000.0] * 4)


def test_the_use_of_keys_and_values_is_drawn_where_engines_tell_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, 2)
    title = "Keys and values of the engines"
    assert title not in drawn(RunLog.read(run))
    log = EventLog(run, "collector-000002")
    for batch in range(2):
        log.event("committed", batch=batch, samples=8, in_flight=5, retractions=0, kv_use=0.7 + 0.1 * batch)
    assert "prefix hits" not in drawn(RunLog.read(run))[title]
    log.event("committed", batch=2, samples=8, prefix_tokens=90, prefix_hits=0.5, prefix_published=36)
    found = drawn(RunLog.read(run))[title]
    assert "prefix hits, 2: 0.5" in found
    assert "read again after a publish, 2: 0.4" in found


def test_mfu_by_hand(tmp_path: Path) -> None:
    run_log = noted(write_run(tmp_path, 2), **H100)
    assert speeds(run_log)[1]["mfu"] == pytest.approx(6 * 1e9 * 4096 / (0.4 * 2 * 989e12))
    assert "Model FLOPs utilization (MFU)" in drawn(run_log)
    assert "There is no MFU" not in render_page(run_log)


def test_samples_that_are_left_out_of_the_updates_make_no_speed(tmp_path: Path) -> None:
    """Half of the 256 samples, of 16 tokens each."""
    run = write_run(tmp_path, 1)
    EventLog(run, "learner-000002").metrics(
        1,
        num_tokens=2000,
        num_updated_tokens=1000,
        num_model_tokens=2048,
        response_tokens_mean=7.75,
        prompt_tokens_mean=8.25,
        seconds=dict(wait=0.6, update=0.4),
        time=START + 20,
    )
    speed = speeds(noted(run, **H100))[1]
    assert speed["mfu"] == pytest.approx(6 * 1e9 * 2048 / (0.4 * 2 * 989e12))
    assert (speed["updated"], speed["trained"]) == (pytest.approx(1000 / 0.4), pytest.approx(1000 / 1.0))
