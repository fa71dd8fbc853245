"""What becomes of groups without a policy gradient, and ScaleRL's objective against a reference of its formula."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter

from pipeline.advantages.compute import AdvantageComputer
from pipeline.config.algorithm import AdvantageSection
from pipeline.data.batch import Batch
from precision.objectives.cispo import CISPO
from precision.objectives.objective import StepContext, TokenBatch
from tests.support.batches import batch_of_rewards

CAP = 5.0


def computer(**options: Any) -> AdvantageComputer:
    section = TypeAdapter[Any](AdvantageSection).validate_python(options)
    return AdvantageComputer(section=section, estimator=section.estimator(), max_new_tokens=8)


HAND = batch_of_rewards([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0, 0.0]])
"""Three prompts, the second without contrast."""


def test_keep_and_skip_differ_only_in_what_is_run_through_the_model() -> None:
    kept, skipped = (
        computer(name="dr_grpo", batch_normalized=True, zero_variance=choice).compute_advantages(HAND)
        for choice in ("keep", "skip")
    )
    assert kept.values.tolist() == skipped.values.tolist()
    assert kept.in_loss.all()
    assert skipped.in_loss.all()
    assert kept.through_model.all()
    assert skipped.through_model.tolist() == [True, True, False, False, True, True, True]


def test_exclude_leaves_the_loss_and_the_standard_deviation() -> None:
    """Deviations ½ -½; 0 0; -⅓ ⅔ -⅓ have standard deviations over five and over seven samples."""
    found = computer(name="dr_grpo", batch_normalized=True, zero_variance="exclude").compute_advantages(HAND)
    assert found.in_loss.tolist() == [True, True, False, False, True, True, True]
    deviations = np.array([1 / 2, -1 / 2, 0, 0, -1 / 3, 2 / 3, -1 / 3])
    np.testing.assert_allclose(found.values, deviations / np.std(deviations[found.in_loss], ddof=1), rtol=1e-6)


def test_exclude_looks_at_rewards_and_skip_at_advantages() -> None:
    """Five of eight solved with k = 4: pass@4 is sure, every advantage is 0, and the rewards differ all the same."""
    batch = batch_of_rewards([[1.0] * 5 + [0.0] * 3, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 8])
    mixed, solved_once, failed = slice(0, 8), slice(8, 16), slice(16, 24)
    found = computer(name="pass_at_k", k=4, zero_variance="exclude").compute_advantages(batch)
    assert not found.values[mixed].any()
    assert found.in_loss[mixed].all()
    assert found.in_loss[solved_once].all()
    assert not found.in_loss[failed].any()
    skipped = computer(name="pass_at_k", k=4, zero_variance="skip").compute_advantages(batch)
    assert not skipped.through_model[mixed].any()
    assert skipped.through_model[solved_once].all()


@pytest.mark.parametrize("name", ["pass_at_k", "maxrl", "f_grpo", "fade", "power"])
def test_what_is_solved_is_asked_in_units_of_what_solves(name: str) -> None:
    """A reward whose highest value is .9 makes the advantages of one that gives 1."""
    low, full = batch_of_rewards([[0.9, 0.0, 0.0, 0.0, 0.0, 0.9]]), batch_of_rewards([[1.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
    of_low = replace(computer(name=name), solved_at=0.9).compute_advantages(low).values
    assert of_low.tolist() == computer(name=name).compute_advantages(full).values.tolist()
    assert of_low.any()


@pytest.mark.parametrize("choice", ["keep", "skip", "exclude"])
def test_a_batch_without_contrast_still_makes_its_step(choice: str) -> None:
    found = computer(name="dr_grpo", batch_normalized=True, zero_variance=choice).compute_advantages(
        batch_of_rewards([[1.0, 1.0], [0.0, 0.0]])
    )
    assert found.in_loss.all()
    assert not found.values.any()


@dataclass(frozen=True)
class Outcome:
    objective: float
    gradient: NDArray[np.float64]
    """[responses] with respect to the learner's log-probabilities."""


def by_the_paper(batch: Batch, learner: NDArray[np.float64]) -> Outcome:
    """J_ScaleRL (arXiv 2510.13786, section 3.2), loop by loop, in Python's float64:

        J = E_x [ 1 / sum_g |y_g| · sum_i sum_t sg(min(rho_it, eps)) A_i^norm log pi_train(y_it) ],  0 < mean(r) < 1

    E_x is the mean over the prompts that fulfill the condition; the inner denominator counts the tokens of all answers
    to one prompt, hence a prompt's tokens count alike and prompts count alike. A^norm is r - mean(r) of the prompt over
    the standard deviation (n - 1) of these differences in the effective batch, that is over the same prompts.
    """
    ends = batch.response_offsets
    prompts = [np.flatnonzero(batch.group == group).tolist() for group in dict.fromkeys(batch.group.tolist())]
    effective = [samples for samples in prompts if len({float(batch.reward[i]) for i in samples}) > 1]
    advantage: dict[int, float] = {}
    for samples in effective:
        mean = math.fsum(float(batch.reward[i]) for i in samples) / len(samples)
        advantage |= {i: float(batch.reward[i]) - mean for i in samples}
    center = math.fsum(advantage.values()) / len(advantage)
    std = math.sqrt(math.fsum((a - center) ** 2 for a in advantage.values()) / (len(advantage) - 1))
    objective, gradient = 0.0, np.zeros(len(learner))
    for samples in effective:
        tokens = [(i, t) for i in samples for t in range(ends[i], ends[i + 1]) if batch.loss_mask[t]]
        for i, t in tokens:
            rho = math.exp(learner[t] - float(batch.rollout_logprobs[t]))
            factor = min(rho, CAP) * advantage[i] / std / len(tokens) / len(effective)
            objective += factor * learner[t]
            gradient[t] = factor
    return Outcome(objective, gradient)


def by_this_code(batch: Batch, learner: NDArray[np.float64], choice: str = "exclude") -> Outcome:
    """The advantage section of scalerl.yaml and CISPO, in float64, as one optimizer step."""
    chosen = computer(name="dr_grpo", batch_normalized=True, aggregation="prompt", zero_variance=choice)
    computed = chosen.compute_advantages(batch)
    step = batch.select(computed.in_loss)
    inside = np.repeat(computed.in_loss, batch.response_lengths)
    logprobs = torch.from_numpy(learner[inside])[None].requires_grad_()
    tokens = TokenBatch(
        rollout_logprobs=torch.from_numpy(step.rollout_logprobs.astype(np.float64))[None],
        advantages=torch.from_numpy(chosen.by_token(step, computed.values[computed.in_loss]))[None],
        mask=torch.from_numpy(step.loss_mask)[None],
    )
    loss, _ = CISPO(cap=CAP).loss(logprobs, tokens, StepContext(num_tokens=step.num_sampled_tokens))
    loss.backward()
    assert logprobs.grad is not None
    gradient = np.zeros(len(learner))
    gradient[inside] = -logprobs.grad[0].numpy()
    return Outcome(-loss.item(), gradient)


def random_batch(seed: int) -> tuple[Batch, NDArray[np.float64]]:
    """3 to 8 prompts of 2 to 16 answers of 1 to 9 tokens with rewards of ±1 or in between, every third prompt of equal
    rewards; one token in ten was not sampled. With it the learner's log-probabilities, some more than CAP times as
    likely."""
    random = np.random.default_rng(seed)
    rewards = []
    for number in range(int(random.integers(3, 9))):
        size, values = int(random.integers(2, 17)), [-1.0, 1.0] if seed % 2 else [-1.0, 0.1, 1 / 3, 1.0]
        drawn = [1.0, -1.0, *random.choice(values, size=size - 2).tolist()]
        rewards.append([random.choice(values)] * size if number % 3 == 0 else drawn)
    batch = batch_of_rewards(rewards, seed=seed, unsampled=0.1)
    return batch, batch.rollout_logprobs + random.normal(0.0, 1.0, batch.num_response_tokens)


@pytest.mark.parametrize("seed", range(60))
def test_scalerl_is_the_paper_s_objective(seed: int) -> None:
    batch, learner = random_batch(seed)
    expected, found = by_the_paper(batch, learner), by_this_code(batch, learner)
    assert found.objective == pytest.approx(expected.objective, abs=1e-12, rel=1e-12)
    np.testing.assert_allclose(found.gradient, expected.gradient, atol=1e-12, rtol=1e-12)


def test_the_baseline_that_the_paper_rejects_is_another_objective() -> None:
    """Skipping groups of equal rewards saves their forward pass; they stay in the mean over prompts."""
    batch, learner = random_batch(0)
    expected, baseline = by_the_paper(batch, learner), by_this_code(batch, learner, "skip")
    assert abs(baseline.objective - expected.objective) > 1e-3


def without(batch: Batch, *samples: int) -> Batch:
    """The batch, with the verifier failed on these samples."""
    failed = np.full(batch.num_samples, np.nan, np.float32)
    failed[list(samples)] = 1.0
    return replace(batch, reward_parts={"verifier_failed": failed})


@pytest.mark.parametrize("normalized", [False, True])
def test_a_sample_without_a_reward_is_no_member_of_its_group(normalized: bool) -> None:
    whole = computer(name="dr_grpo", batch_normalized=normalized)
    fewer = batch_of_rewards([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    found = whole.compute_advantages(without(HAND, 6))
    assert found.values.tolist() == [*whole.compute_advantages(fewer).values.tolist(), 0.0]
    assert found.in_loss.all()


def test_a_group_without_any_reward_is_no_part_of_the_step() -> None:
    found = computer(name="grpo").compute_advantages(without(HAND, 0, 1))
    assert found.in_loss.tolist() == [False, False, True, True, True, True, True]
    assert not found.values[:2].any()


def test_a_formula_gets_no_smaller_group_than_it_needs() -> None:
    batch = batch_of_rewards([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    found = computer(name="pass_at_k", k=3).compute_advantages(without(batch, 2, 3))
    assert not found.values[:4].any()
    assert found.values[4:].any()
