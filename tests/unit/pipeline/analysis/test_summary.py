from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launch.show.runs import render, render_list
from pipeline.analysis.report import write_report
from pipeline.analysis.run_log import RunLog
from pipeline.analysis.summary import (
    LEARNER_PHASES,
    alarm_history,
    bottleneck,
    formats_differ,
    list_runs,
    phase_shares,
    summary,
    time_shares,
    whole_stages,
)
from pipeline.config.recipe import Recipe
from pipeline.data.event_log import EventLog
from pipeline.data.run_recipes import add_recipe
from pipeline.data.store import BatchStore
from pipeline.errors import StoreError
from tests.support.batches import batch_of_rewards


def text_of(table: object) -> str:
    console = Console(width=120, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_finished_run(write_run: Callable[..., Path]) -> None:
    numbers = summary(write_run(24))
    assert numbers["pass_at_1_first"] == 0.125
    assert (numbers["pass_at_1_last_low"], numbers["pass_at_1_last"], numbers["pass_at_1_last_high"]) == (
        0.4375,
        0.5,
        0.5625,
    )
    assert (numbers["k"], numbers["pass_at_k_first"], numbers["pass_at_k_last"]) == (8, 0.375, 0.75)
    assert (numbers["version_first"], numbers["version_last"]) == (0, 24)
    assert (numbers["steps"], numbers["steps_planned"], numbers["state"]) == (24, 24, "finished")
    # EventLog from START to the end of step 23: 10 s, 23 steps of 2 s before it, and its own 2 s.
    assert numbers["wall_s"] == pytest.approx(10 + 23 * 2 + 2)
    assert (numbers["samples"], numbers["tokens"]) == (24 * 256, 48_000)
    assert numbers["tokens_per_s"] == pytest.approx(48_000 / (24 * 2.0))
    assert numbers["ess_last"] == pytest.approx(0.976)
    assert numbers["ess_min"] == pytest.approx(0.976)
    assert numbers["bottleneck"] == "rollouts: the learner waits 55 % of each step; add engines or allow lag"
    assert (numbers["restarts"], numbers["dropped"]) == (0, 0)
    json.dumps(numbers, allow_nan=False)


def test_a_pause_between_two_sessions_makes_no_run_slower(write_run: Callable[..., Path]) -> None:
    run = write_run(2)
    before = summary(run)["wall_s"]
    again = EventLog(run, "learner-000002")
    for process in ("engine-0", "learner"):
        again.event("started", process=process, time=1e12)
    again.metrics(2, num_tokens=2000, seconds=dict(wait=1.0, update=1.0), time=1e12 + 5.0)
    numbers = summary(run)
    assert numbers["wall_s"] == pytest.approx(before + 5.0, abs=1e-3), "the pause between two starts is nobody's time"
    assert numbers["tokens_per_s"] == pytest.approx(1000.0)


def test_first_and_last_pass_at_k_are_of_one_k(write_run: Callable[..., Path]) -> None:
    """At the last version too few samples of a prompt were judged for pass@8."""
    run = write_run(4)
    event_log = EventLog(run, "collector-000002")
    event_log.event("evaluated", version=5, pass_at_1=0.5, pass_at_k={"1": 0.5, "2": 0.625, "4": 0.75}, time=1e12)
    numbers = summary(run)
    assert (numbers["k"], numbers["pass_at_k_first"], numbers["pass_at_k_last"]) == (2, pytest.approx(0.225), 0.625)


def test_a_step_trained_again_counts_once(write_run: Callable[..., Path]) -> None:
    run = write_run(5)
    EventLog(run, "learner-000001").metrics(4, num_tokens=3000, ess=0.5)
    numbers = summary(run)
    assert (numbers["steps"], numbers["tokens"], numbers["ess_last"]) == (5, 4 * 2000 + 3000, 0.5)


def test_samples_are_those_of_every_batch_once(write_run: Callable[..., Path]) -> None:
    """A collector may be killed between a batch and its event; a batch whose file is gone may be made again."""
    run = write_run(2)
    BatchStore(run / "batches").commit(batch_of_rewards([[1.0, 0.0]] * 4, index=2))
    assert summary(run)["samples"] == 2 * 256 + 8
    EventLog(run, "collector-000002").event("committed", batch=1, samples=248)
    assert summary(run)["samples"] == 256 + 248 + 8


def test_a_run_that_has_not_begun(write_run: Callable[..., Path]) -> None:
    numbers = summary(write_run(0))
    assert (numbers["state"], numbers["steps"], numbers["wall_s"]) == ("not started", 0, 0.0)
    assert numbers["pass_at_1_first"] is None
    assert numbers["ess_last"] is None
    assert "– → –" in text_of(render(numbers))


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        summary(tmp_path / "nothing")
    with pytest.raises(StoreError, match=r"no recipe\.yaml"):
        summary(tmp_path)


def test_a_run_of_sft_has_a_table_and_a_page_of_its_own(write_run: Callable[..., Path]) -> None:
    run = write_run(0, steps=60)
    (run / "sft.json").write_text("{}\n", encoding="utf-8")
    log = EventLog(run, "sft")
    for step in range(60):
        held_out = {"held_out_loss": 2.0 - 0.01 * step} if step in (0, 59) else {}
        log.metrics(step, loss=3.0 - 0.02 * step, lr=1e-3, num_tokens=100, grad_norm=1.0, entropy=1.0, **held_out)
    table = text_of(render(summary(run)))
    for expected in ("3 → 1.82 nats a token", "2 → 1.41 nats a token", "60 of 60", "6\u2009000", "0.001"):
        assert expected in table
    page = write_report(run).read_text(encoding="utf-8")
    for title in ("Loss, nats a token", "Held-out loss", "Gradient norm"):
        assert title in page
    for text in (table, page.partition("<h2>Recipe</h2>")[0]):
        for absent in ("pass@", "p3o", "nothing to judge", "ESS, last", "engines", "<h2>Environment"):
            assert absent not in text


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
    assert (ended[0].name, ended[0].beyond, ended[0].steps) == (
        "ess low",
        "0.1 at worst, below 0.3",
        "3 of steps 3 to 7",
    )
    assert alarm_history(with_ess(run_log, {11: 0.2}))[0].steps == "step 11, until now"


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


def steps(count: int = 3, **seconds: float) -> list[dict[str, Any]]:
    return [{"step": step, "time": 100.0 + 10.0 * step, "seconds": seconds} for step in range(count)]


def test_a_waiting_learner_blames_rollouts_with_its_share() -> None:
    verdict = bottleneck(time_shares(steps(wait=6.1, logprobs=1.0, update=2.0, publish=0.9)))
    assert verdict == "rollouts: the learner waits 61 % of each step; add engines or allow lag"


@pytest.mark.parametrize(
    ("seconds", "beginning"),
    [
        (dict(wait=1.0, logprobs=3.0, update=5.0, publish=1.0), "learner: scoring and updating take 80 %"),
        (dict(wait=1.0, update=2.0, publish=7.0), "publishing: moving weights takes 70 %"),
        (dict(wait=1.0, update=1.0, record=8.0), "records: writing log-probabilities and statistics takes 80 %"),
        (dict(wait=1.0, update=1.0, save=8.0), "checkpoints: saving takes 80 %"),
    ],
)
def test_the_slowest_group_is_named(seconds: dict[str, float], beginning: str) -> None:
    assert bottleneck(time_shares(steps(**seconds))).startswith(beginning)


@pytest.mark.parametrize(
    ("slow", "beginning"),
    [
        ("generate", "rollouts: the learner waits 80 %"),
        ("hold", "rollouts: the learner waits 80 %"),
        ("evaluate", "evaluations: the learner waits 70 % of each step for held-out answers"),
        ("commit", "committing: the learner waits 70 % of each step until its batch is written"),
    ],
)
def test_the_phase_of_the_awaited_batch_is_blamed(slow: str, beginning: str) -> None:
    """Each step of 10 s waits for 8: for 7 of them, its batch was in the slow phase."""
    events = [{"kind": "committed", "batch": step, "seconds": {slow: 7.0}} for step in range(3)]
    assert bottleneck(time_shares(steps(wait=8.0, update=2.0), events)).startswith(beginning)


def test_a_wait_is_split_from_the_end_of_the_batch() -> None:
    event = {"kind": "committed", "batch": 2, "seconds": {"generate": 50.0, "evaluate": 5.0, "commit": 1.0}}
    shares = time_shares(steps(wait=4.0, update=6.0), [event])
    assert (shares["wait for commits"], shares["wait for evaluations"]) == (pytest.approx(0.05), pytest.approx(0.15))
    assert shares["wait for rollouts"] == pytest.approx(0.2), "of step 1, whose batch is not known"


def test_the_first_step_and_old_steps_do_not_count() -> None:
    def judged(*seconds: dict[str, float], **how: int) -> dict[str, float]:
        return phase_shares([{"step": step, "seconds": each} for step, each in enumerate(seconds)], **how)

    assert judged(dict(wait=1000.0), *[dict(update=1.0)] * 5)["wait"] == 0.0
    assert judged(*[dict(wait=1.0)] * 50, *[dict(update=1.0)] * 4, window=4)["update"] == pytest.approx(1.0)
    assert judged(dict(wait=3.0, update=1.0))["wait"] == pytest.approx(0.75), "the only one counts"
    assert judged() == {}
    assert bottleneck(time_shares([])) == "nothing to judge yet: no step has finished"


@pytest.mark.parametrize("count", [25, 32, 33, 50, 64, 90])
def test_the_bottleneck_is_of_whole_stages(count: int) -> None:
    """Of a stage of 32 steps, the first waits for rollouts until all are there: 80 % of the time."""
    lines = [dict(step=step, seconds=dict(wait=0.0 if step % 32 else 128.0, update=1.0)) for step in range(count)]
    assert phase_shares(lines, stage=32)["wait"] == pytest.approx(128 / (128 + min(count, 32)))
    assert [whole_stages(20, stage) for stage in (1, 4, 8, 32)] == [20, 20, 24, 32]


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(LEARNER_PHASES, st.floats(0.001, 1e3))), min_size=1, max_size=30))
def test_shares_add_up_to_one(seconds: list[dict[str, float]]) -> None:
    lines = [{"step": step, "seconds": each} for step, each in enumerate(seconds)]
    assert sum(phase_shares(lines).values()) == pytest.approx(1.0)
    assert sum(time_shares(lines).values()) == pytest.approx(1.0)
