"""The teacher's part of the advantages: by hand, by exact enumeration, and what a recipe may not combine it with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.advantages.compute import AdvantageComputer, mean_reverse_kl, reverse_kl
from pipeline.advantages.methods import Distillation, DrGRPO
from pipeline.config.loader import load_recipe
from pipeline.data.batch import TEACHER_FAILED, Batch
from pipeline.errors import RecipeError, StoreError
from precision.objectives.cispo import CISPO
from precision.objectives.objective import StepContext, TokenBatch
from tests.support.batches import batch_of_rewards, parts_of

TEACHER = Path("teacher")


def taught(batch: Batch, gap: float) -> Batch:
    """The teacher finds each token by `gap` nats less likely than the engine did."""
    logprobs = np.where(batch.loss_mask, batch.rollout_logprobs - np.float32(gap), np.float32(0.0))
    return replace(batch, teacher_logprobs=logprobs)


def computer(aggregation: str = "token", **options: Any) -> AdvantageComputer:
    section = DrGRPO.model_validate(dict(aggregation=aggregation))
    distillation = Distillation(path=TEACHER, **options)
    return AdvantageComputer(
        section=section, estimator=section.estimator(), max_new_tokens=9, distillation=distillation
    )


MIXED = batch_of_rewards([[1.0, 0.0], [1.0, 1.0]], unsampled=0.3)


def test_each_token_is_judged_by_the_teacher_alone() -> None:
    (part,) = parts_of(computer(coefficient=2.0), taught(MIXED, 0.25), 1)
    np.testing.assert_allclose(part.advantages, np.where(MIXED.loss_mask, -0.5, 0.0), atol=1e-6)
    assert part.trained is None, "groups of equal rewards are learned from like the others"
    assert mean_reverse_kl(taught(MIXED, 0.25)) == pytest.approx(0.25)


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "dr_grpo", "maxrl", "pass_at_k"])
def test_a_teacher_alone_needs_no_second_sample_of_a_prompt(advantage: str) -> None:
    overrides = [f"advantage={{name: {advantage}, aggregation: token}}", "rollout.group_size=1"]
    recipe = load_recipe(Path("distill"), overrides)
    made = AdvantageComputer(
        section=recipe.advantage,
        estimator=recipe.advantage.estimator(),
        max_new_tokens=9,
        distillation=recipe.distillation,
    )
    batch = taught(batch_of_rewards([[1.0], [0.0], [1.0]]), 0.25)
    (part,) = parts_of(made, batch, 1)
    np.testing.assert_allclose(part.advantages, np.full(len(part.advantages), -0.25), atol=1e-6)
    with pytest.raises(RecipeError, match="group_size is 1"):
        load_recipe(Path("distill"), [*overrides, "distillation.reward_coefficient=1.0"])


def test_a_reward_counts_beside_it() -> None:
    (part,) = parts_of(computer(reward_coefficient=3.0), taught(MIXED, 0.25), 1)
    of_reward = np.repeat([0.5, -0.5, 0.0, 0.0], MIXED.response_lengths)
    np.testing.assert_allclose(part.advantages, np.where(MIXED.loss_mask, 3.0 * of_reward - 0.25, 0.0), atol=1e-6)


def test_a_group_that_the_teacher_did_not_score_is_no_part_of_the_step() -> None:
    failed = np.array([1.0, 1.0, np.nan, np.nan], np.float32)
    batch = replace(batch_of_rewards([[1.0, 0.0], [1.0, 0.0]]), reward_parts={TEACHER_FAILED: failed})
    assert batch.judged.all(), "its rewards are there"
    found = computer(reward_coefficient=1.0).compute_advantages(batch)
    assert found.in_loss.tolist() == [False, False, True, True]
    assert found.values.tolist() == [0.0, 0.0, 0.5, -0.5]


def test_what_the_teacher_alone_judges_needs_neither_a_second_sample_nor_a_reward() -> None:
    failed = np.array([1.0, np.nan, np.nan, np.nan], np.float32)
    batch = replace(batch_of_rewards([[1.0, 0.0], [1.0, 0.0]]), reward_parts={TEACHER_FAILED: failed})
    assert computer().compute_advantages(batch).in_loss.all(), "the other sample of the first prompt is learned from"
    (part,) = parts_of(computer(), taught(batch, 0.25), 1)
    assert part.batch.num_samples == 4


def test_it_is_averaged_as_the_recipe_says() -> None:
    (part,) = parts_of(computer("sequence"), taught(MIXED, 1.0), 1)
    sums = np.add.reduceat(part.advantages, MIXED.response_offsets[:-1])
    np.testing.assert_allclose(sums, -MIXED.num_sampled_tokens / 4, rtol=1e-6)


def test_its_gradient_is_that_of_the_reverse_kl() -> None:
    """Every token of a vocabulary of five once, weighed by its own probability: the expectation, not a sample of it."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=random, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(5, generator=random, dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    kl = (logprobs.exp() * (logprobs - teacher)).sum()
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    both: dict[str, Any] = dict(rollout_logprobs=logprobs.detach().numpy(), teacher_logprobs=teacher.numpy())
    batch = replace(batch_of_rewards([[1.0]]), **both, loss_mask=np.ones(5, np.bool_))
    advantages = torch.from_numpy(-reverse_kl(batch))
    tokens = TokenBatch(
        rollout_logprobs=logprobs.detach()[None],
        advantages=(advantages * logprobs.detach().exp())[None],
        mask=torch.ones(1, 5, dtype=torch.bool),
    )
    loss, _ = CISPO().loss(logprobs[None], tokens, StepContext(num_tokens=1, step_ess=1.0))
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, expected)


def test_a_batch_without_a_teacher_is_refused() -> None:
    with pytest.raises(StoreError, match="batch 0 has no log-probabilities of a teacher"):
        parts_of(computer(), MIXED, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["distillation.urls=[http://a:1]"], "both path and urls are given"),
        (["distillation.path=null"], "neither path nor urls is given"),
        (["distillation.path=null", "distillation.urls=[http://a:1,http://a:1]"], "names a server twice"),
        (["distillation.path=null", "distillation.urls=[a:1]"], "expected a different http://HOST:PORT"),
        (["advantage.zero_variance=exclude"], "groups of equal rewards have an advantage, too; set it to keep"),
        (["prompts.refill=true"], "set prompts.refill to false"),
        (["learner.temperature=0.5"], "leave learner.temperature out"),
        (["rollout.top_p=0.9"], "over the whole vocabulary"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(Path("distill"), changes)
