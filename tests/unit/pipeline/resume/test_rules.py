"""Every key of the recipe has its rule, and a refusal is one line that says why and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config.loader import changed_keys
from pipeline.config.recipe import Recipe
from pipeline.errors import RunConflictError
from pipeline.resume import change_of, refuse_changes, refuse_impossible


def recipe(**sections: Any) -> Recipe:
    base: dict[str, Any] = dict(run=dict(name="r", steps=20), model=dict(path="m"), task=dict(name="sort_digits"))
    return Recipe.model_validate({key: base.get(key, {}) | sections.get(key, {}) for key in base | sections})


@pytest.mark.parametrize(
    ("key", "change"),
    [
        *(("run.steps", "free"), ("run.seed", "fork"), ("run.name", "fork"), ("model.path", "never")),
        *(("model.fp32_lm_head", "fork"), ("task.columns.prompt", "fork"), ("reward.workers", "free")),
        *(("reward.sandbox", "fork"), ("rollout.engines", "free"), ("rollout.group_size", "fork")),
        *(("rollout.interruption.phrase", "fork"), ("learner.tensor_parallel", "free")),
        *(("learner.precision", "never"), ("learner.updates_per_batch", "fork"), ("learner.optimizer.lr", "free")),
        *(("learner.optimizer.clip_grad", "free"), ("learner.optimizer.weight_decay", "free")),
        *(("learner.optimizer.betas", "fork"), ("prompts.refill", "free"), ("objective.clip_high", "fork")),
        *(("distillation.urls", "free"), ("distillation.coefficient", "fork"), ("schedule.kind", "fork")),
        *(("weights.keep", "free"), ("weights.kv_cache", "fork"), ("controller", "fork")),
        *(("checkpoint.every", "free"), ("evaluation.samples", "free"), ("evaluation.temperature", "free")),
    ],
)
def test_each_section_says_what_may_change(key: str, change: str) -> None:
    taught = recipe(
        distillation=dict(urls=["http://teacher:1"]),
        rollout=dict(interruption=dict(from_tokens=1, to_tokens=2, answer_tokens=3)),
    )
    assert change_of(taught, key) == change


def test_what_is_refused_says_why_and_how_to_fork() -> None:
    before = recipe()
    changes = changed_keys(before, recipe(rollout=dict(group_size=4), learner=dict(tensor_parallel=2)))
    with pytest.raises(RunConflictError) as refused:
        refuse_changes("runs/r", before, changes)
    said = str(refused.value)
    assert "rollout.group_size: 8 → 4 (batches or weights so far were made with the old value)" in said
    assert "tensor_parallel" not in said
    assert "`evenkeel fork runs/r NEW --at STEP`" in said
    assert "\n" not in said
    refuse_changes("runs/r", before, changes, fork=True)
    refuse_changes("runs/r", before, {key: change for key, change in changes.items() if "group" not in key})
    with pytest.raises(RunConflictError, match=r"a fork of runs/r cannot have model.path: m → n .*the old form"):
        refuse_changes("runs/r", before, {"model.path": "m → n"}, fork=True)


def possible(
    before: Recipe, after: Recipe, *, settled: int = 20, published: int = 20, scored: int = 0, num_promoted: int = 0
) -> None:
    optimizer_steps = before.run.steps * before.learner.updates_per_batch
    refuse_impossible(
        before,
        after,
        run="runs/r",
        settled=settled,
        published=published,
        scored=scored,
        optimizer_steps=optimizer_steps,
        num_promoted=num_promoted,
    )


def steps(number: int, **sections: Any) -> Recipe:
    return recipe(run=dict(steps=number), **sections)


def test_steps_do_not_fall_below_what_there_is() -> None:
    possible(steps(40), steps(20))
    with pytest.raises(RunConflictError, match=r"run.steps: 40 → 19, but runs/r holds 20 steps"):
        possible(steps(40), steps(19))


def test_a_decay_over_all_steps_has_to_say_where_it_ends() -> None:
    cosine = dict(optimizer=dict(decay="cosine"))
    with pytest.raises(RunConflictError, match=r"decay_steps=40 .* =80 "):
        possible(
            steps(20, learner=cosine | dict(updates_per_batch=2)), steps(40, learner=cosine | dict(updates_per_batch=2))
        )
    possible(steps(20, learner=cosine), steps(20, learner=cosine))
    ends = dict(optimizer=dict(decay="cosine", decay_steps=40))
    possible(steps(20, learner=cosine), steps(40, learner=ends))
    possible(steps(20), steps(40))


def test_a_stage_that_ended_early_is_not_gone_on_with() -> None:
    staged = dict(schedule=dict(kind="staged", updates_per_stage=8))
    with pytest.raises(RunConflictError, match=r"NEW --at 16`"):
        possible(steps(20, **staged), steps(40, **staged))
    possible(steps(16, **staged), steps(40, **staged), settled=16, published=16)
    possible(steps(20, **staged), steps(40, **staged), settled=20, published=16)
    possible(steps(20, **staged), steps(40, **staged), settled=20, published=16, scored=16)
    with pytest.raises(RunConflictError, match=r"is under way or over.* NEW --at 16`"):
        possible(steps(20, **staged), steps(40, **staged), settled=18, published=16, scored=18)
    possible(steps(20, **staged), steps(20, **staged), settled=18, published=16, scored=18)


@pytest.mark.parametrize("change", [dict(micro_batch_tokens=4096), dict(tensor_parallel=2), dict(context_parallel=2)])
def test_what_cuts_micro_batches_stays_where_they_are_learned_from_by_themselves(change: dict[str, Any]) -> None:
    possible(steps(20), steps(20, learner=change))
    alone = dict(objective=dict(name="p3o", ess_scope="micro_batch"))
    possible(steps(20, **alone), steps(30, **alone))
    with pytest.raises(RunConflictError, match=rf"learner.{next(iter(change))}: they cut micro-batches otherwise"):
        possible(steps(20, **alone), steps(20, learner=change, **alone))


def test_deltas_are_not_made_from_whole_policies_of_another_channel() -> None:
    possible(steps(20), steps(20, weights=dict(channel="broadcast")))
    with pytest.raises(RunConflictError, match=r"weights.channel: disk → delta"):
        possible(steps(20), steps(20, weights=dict(channel="delta")))


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        (dict(rollout=dict(urls=["http://other:30000"])), "rollout.urls"),
        (dict(weights=dict(channel="ipc")), "weights.channel"),
    ],
)
def test_what_keeps_engines_in_their_formats_is_refused_once_the_controller_has_changed_them(
    changed: dict[str, Any], key: str
) -> None:
    controller = dict(controller=dict(ess_floor=0.9))
    before, after = recipe(**controller), recipe(**controller, **changed)
    possible(before, after)
    possible(before, recipe(**controller, weights=dict(channel="broadcast")), num_promoted=2)
    possible(after, after, num_promoted=2)
    with pytest.raises(
        RunConflictError, match=rf"^{key}: engines .* of runs/r holds 2 modules unquantized; "
    ) as refused:
        possible(before, after, num_promoted=2)
    assert "\n" not in str(refused.value)
