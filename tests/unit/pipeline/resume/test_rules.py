"""Every key of the recipe has its rule, and a refusal is one line that says why and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from pipeline.config.loader import changed_keys
from pipeline.config.recipe import Recipe
from pipeline.errors import RunConflictError
from pipeline.resume.rules import (
    CUTS_MICRO_BATCHES,
    NOT_IN_A_CHECKPOINT,
    RULES,
    SAFE,
    refuse_impossible,
    refuse_unsafe,
    rule_of,
)

WHOLE = {"task", "prompts", "objective", "correction", "advantage", "schedule", "controller"}
"""Sections of which no key may change."""
OF_THE_TEACHERS_SERVERS = {f"distillation.{key}" for key in ("urls", "tensor_parallel", "extra_args")}
"""Of a section that may be absent, and goes as a whole but for these."""


def recipe(**sections: Any) -> Recipe:
    base: dict[str, Any] = dict(run=dict(name="r", steps=20), model=dict(path="m"), task=dict(name="sort_digits"))
    return Recipe.model_validate({key: base.get(key, {}) | sections.get(key, {}) for key in base | sections})


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key with a value of its own, as a recipe names it; the sections that go as a whole by their name."""
    for name, field in section.model_fields.items():
        key, kind = f"{prefix}{name}", field.annotation
        if key not in WHOLE and isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys(kind, f"{key}.")
        else:
            yield key


def test_every_key_of_the_recipe_has_a_rule_and_every_rule_a_key() -> None:
    assert sorted(RULES.keys() - OF_THE_TEACHERS_SERVERS) == sorted(keys(Recipe)), (
        "decide whether a run may go on with another value of a new key"
    )
    assert NOT_IN_A_CHECKPOINT.keys() < RULES.keys()
    assert all(reason is SAFE or ("\n" not in reason and len(reason) < 90) for reason in RULES.values())


def test_a_key_goes_by_its_own_rule_or_by_its_sections() -> None:
    assert rule_of("learner.optimizer.lr") == "learner.optimizer.lr"
    assert rule_of("task.columns.prompt") == "task"
    assert rule_of("rollout.interruption.phrase") == "rollout.interruption"
    with pytest.raises(KeyError, match=r"has no rule"):
        rule_of("learner.novelty")


def test_what_is_refused_says_why_and_how_to_fork() -> None:
    changes = changed_keys(recipe(), recipe(rollout=dict(group_size=4), learner=dict(tensor_parallel=2)))
    with pytest.raises(RunConflictError) as refused:
        refuse_unsafe("runs/r", changes)
    said = str(refused.value)
    assert "rollout.group_size: 8 → 4 (batches before and after it would be sampled differently)" in said
    assert "tensor_parallel" not in said
    assert "`evenkeel fork runs/r NEW --at STEP`" in said
    assert "\n" not in said
    refuse_unsafe("runs/r", {key: change for key, change in changes.items() if "group" not in key})


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
    assert set(CUTS_MICRO_BATCHES) <= {key for key, reason in RULES.items() if reason is SAFE}
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
