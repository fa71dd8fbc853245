from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from launch.show.runs import render
from pipeline.analysis.figures.drawing import curve
from pipeline.analysis.html_report import write_report
from pipeline.analysis.run_log import RunLog
from pipeline.analysis.summary import summary
from pipeline.data.event_log import EventLog
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


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (dict(kind="sync"), "sync"),
        (dict(kind="async", lag=3), "async, lag 3"),
        (dict(kind="staged", updates_per_stage=4), "staged, µ = 4"),
    ],
)
def test_layout_precision_objective_and_schedule(
    write_run: Callable[..., Path], schedule: dict[str, object], text: str
) -> None:
    overrides = dict(
        learner=dict(tensor_parallel=2, pipeline_parallel=3),
        rollout=dict(precision="fp8_block", engines=2),
        objective=dict(name="clipped"),
        schedule=schedule,
    )
    numbers = summary(write_run(2, overrides=overrides))
    assert numbers["learner_layout"] == "TP2×PP3"
    assert numbers["rollout_precision"] == "fp8_block"
    assert (numbers["engines"], numbers["objective"], numbers["schedule"]) == ("2 × TP1", "clipped", text)


def test_choices_are_named_with_what_is_not_default(write_run: Callable[..., Path]) -> None:
    overrides = dict(
        objective=dict(name="clipped", clip_high=0.28, anchor="old"),
        correction=dict(name="tis", cap=2.0),
        advantage=dict(name="dr_grpo", aggregation="prompt", batch_normalized=True),
    )
    numbers = summary(write_run(2, overrides=overrides))
    assert numbers["objective"] == "clipped (anchor old, clip_high 0.28)"
    assert numbers["correction"] == "tis"
    assert numbers["advantage"] == "dr_grpo (aggregation prompt, batch_normalized)"
    text = " ".join(text_of(render(numbers)).split())
    assert "dr_grpo (aggregation prompt, batch_normalized), correction tis" in text


@pytest.mark.parametrize(("updates", "schedule", "warned"), [(1, "sync", True), (4, "sync, 4 updates a batch", False)])
def test_updates_of_a_batch_and_a_clip_that_cannot_act_are_told(
    write_run: Callable[..., Path], updates: int, schedule: str, warned: bool
) -> None:
    objective = dict(name="clipped", anchor="old")
    numbers = summary(write_run(2, overrides=dict(objective=objective, learner=dict(updates_per_batch=updates))))
    assert numbers["schedule"] == schedule
    shown = " ".join(text_of(render(numbers)).split())
    assert ("the clip of objective clipped never acts" in shown) == warned


def test_a_step_trained_again_counts_once(write_run: Callable[..., Path]) -> None:
    run = write_run(5)
    EventLog(run, "learner-000001").metrics(4, num_tokens=3000, ess=0.5)
    numbers = summary(run)
    assert (numbers["steps"], numbers["tokens"], numbers["ess_last"]) == (5, 4 * 2000 + 3000, 0.5)


def test_restarts_and_drops_are_counted_and_shown(write_run: Callable[..., Path]) -> None:
    run = write_run(3)
    event_log = EventLog(run, "learner-000001")
    event_log.event("restarted", process="learner", reason="exit code -9")
    event_log.event("committed", batch=3, samples=248, dropped=1)
    numbers = summary(run)
    assert (numbers["restarts"], numbers["dropped"], numbers["state"]) == (1, 1, "unfinished: 3 of 24 steps")
    assert "restarts 1, dropped groups 1" in text_of(render(numbers))


def test_prompts_that_were_not_asked_as_they_came_are_counted_and_shown(write_run: Callable[..., Path]) -> None:
    run = write_run(2)
    assert "all asked as they came" in text_of(render(summary(run)))
    event_log = EventLog(run, "learner-000001")
    for refills in (3, 4):
        event_log.event(
            "committed", batch=2, samples=8, refills=refills, zero_variance=2, solved_groups=1, interrupted=0
        )
    numbers = summary(run)
    assert (numbers["refills"], numbers["zero_variance"], numbers["solved_groups"]) == (7, 4, 2)
    assert "refills 7, groups without contrast 4, groups of solved problems 2" in text_of(render(numbers))


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


def test_table_shows_the_numbers(write_run: Callable[..., Path]) -> None:
    text = text_of(render(summary(write_run(24))))
    for expected in (
        "12.5 % → 50.0 % (95 %: 43.8 % to 56.2 %)",
        "37.5 % → 75.0 %",
        "24 of 24",
        "58 s",
        "one process, bf16",
    ):
        assert expected in text


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        summary(tmp_path / "nothing")
    with pytest.raises(StoreError, match=r"no recipe\.yaml"):
        summary(tmp_path)


def test_a_failure_of_a_held_out_sample_alone_is_told_as_such(write_run: Callable[..., Path]) -> None:
    run = write_run(1)
    EventLog(run, "collector-000009").event("reward_failed", reason="raised", detail="ValueError: no")
    (told,) = [sentence for sentence in summary(run)["warnings"] if "verifier" in sentence]
    assert told.startswith("a sample that is not trained on")
    assert told.endswith("raised: ValueError: no")


def test_what_the_teacher_did_not_score_is_no_failure_of_the_verifier(write_run: Callable[..., Path]) -> None:
    run = write_run(0)
    EventLog(run, "collector-000001").event("teacher_failed", reason="no answer", detail="refused")
    EventLog(run, "collector-000001").event("committed", batch=0, samples=32)
    EventLog(run, "learner-000001").metrics(0, verifier_failures=0.0, teacher_failures=8.0)
    found = summary(run)
    assert (found["verifier_failures"], found["teacher_failures"]) == (0, 8)
    told = "8 of 32 samples were not scored by the teacher and left out of the loss; the first, no answer: refused"
    assert told in found["warnings"]
    assert not [sentence for sentence in found["warnings"] if "verifier" in sentence]


def test_a_reward_that_never_solves_is_a_warning_until_a_sample_is_solved(write_run: Callable[..., Path]) -> None:
    run = write_run(0)
    EventLog(run, "collector-000009").event("unsolved", batches=3, highest=0.9, solved_at=1.0)
    (told,) = [sentence for sentence in summary(run)["warnings"] if "solved_at" in sentence]
    assert told.startswith("no sample of 3 batches reached reward.solved_at 1, the highest reward was 0.9:")
    EventLog(run, "learner-000009").metrics(0, solve_rate=0.1, num_tokens=1)
    assert not [sentence for sentence in summary(run)["warnings"] if "solved_at" in sentence]


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
    for title in ("Loss, nats a token", "Held-out loss", "Learning rate", "Tokens learned, a step"):
        assert title in page
    for text in (table, page.partition("<h2>Recipe</h2>")[0]):
        for absent in ("pass@", "p3o", "nothing to judge", "ESS, last", "engines"):
            assert absent not in text


def test_no_row_stands_twice_where_evaluations_ask_once(write_run: Callable[..., Path]) -> None:
    run = write_run(2, evaluations=False)
    for version in (0, 2):
        EventLog(run, "collector-000002").event("evaluated", version=version, pass_at_1=0.5, pass_at_k={"1": 0.5})
    assert text_of(render(summary(run))).count("held-out pass@1") == 1
    assert write_report(run).read_text(encoding="utf-8").count("pass@1</dt>") == 0


def test_a_command_in_a_sentence_is_code_on_the_page_and_markup_is_text(write_run: Callable[..., Path]) -> None:
    run = write_run(1)
    EventLog(run, "collector-000009").event("reward_failed", reason="raised", detail="see `evenkeel <x>`")
    page = write_report(run).read_text(encoding="utf-8")
    assert "see <code>evenkeel &lt;x&gt;</code>" in page


def test_a_learning_rate_is_drawn_as_it_was_set(write_run: Callable[..., Path]) -> None:
    run = RunLog.read(write_run(60, steps=60))
    smooth, exact = (curve(run, "lr", [("reward_mean", "x", "green")], smooth=smooth) for smooth in (True, False))
    assert smooth is not None
    assert exact is not None
    assert smooth.count("opacity: 0.3") > 0
    assert exact.count("opacity: 0.3") == 0
