"""An episode in two rows, of which the second repeats the first and samples on, counts as the episode in one row with
the same sampled tokens: in advantages, denominators, objectives, corrections, statistics and metrics, bit by bit except
where sums have zeros at other places."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.advantages.compute import AdvantageComputer
from pipeline.advantages.methods import Advantage, Distillation, OverlongPenalty, PassAtK
from pipeline.config.algorithm import ADVANTAGES
from pipeline.control.step_controller import mean_age, ratio_sums
from pipeline.data.batch import ENVIRONMENT_FAILED, VERIFIER_FAILED, Batch, DroppedGroup, StopReason
from pipeline.ports.learner import Update
from pipeline.rollout.batch_builder import attempts
from pipeline.trainer.batches import asked_solve_rate, describe, merge_updates
from precision.corrections import MIS, OPSM, TIS, Correction, IcePop, NoCorrection, Rejection
from precision.mismatch.alarms import alarms
from precision.mismatch.statistics import Mismatch, StepTokens
from precision.objectives.clipped import GSPO, Clipped, Decoupled
from precision.objectives.m2po import M2PO
from precision.objectives.mu_grpo import MuGRPO
from precision.objectives.objective import Objective, ScoredStep
from precision.objectives.p3o import P3O, P4O, Split
from precision.objectives.topr import TOPR
from tests.support.batches import batch_of_episodes, parts_of

REWARDS = [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.25, 1.0], [1.0, 1.0, 0.0, 0.0, 0.0]]
SEED = 3


def pair(*, failed: bool = False) -> tuple[Batch, Batch]:
    """A batch of episodes of one row each, and the same with forks. `failed`: of some the verifier or the environment
    failed, and one group is left with a single reward."""
    found = []
    for forked in (False, True):
        batch = batch_of_episodes(REWARDS, forked=forked, seed=SEED)
        if failed:
            of_verifier, of_environment = (np.isin(batch.episode, lost) for lost in ([0, 7, 8], [11]))
            lost = of_verifier | of_environment
            batch = dataclasses.replace(
                batch,
                reward_parts={
                    VERIFIER_FAILED: np.where(of_verifier, 1.0, np.nan).astype(np.float32),
                    ENVIRONMENT_FAILED: np.where(of_environment, 1.0, np.nan).astype(np.float32),
                },
                loss_mask=batch.loss_mask & ~np.repeat(lost, batch.response_lengths),
            )
        found.append(batch)
    one, two = found
    assert one.num_samples == one.num_episodes == two.num_episodes < two.num_samples
    return one, two


def of_advantage(section: Advantage, **changes: Any) -> AdvantageComputer:
    return AdvantageComputer(section=section, estimator=section.estimator(), max_new_tokens=20, **changes)


SECTIONS = [PassAtK(k=2) if kind is PassAtK else kind() for kind in ADVANTAGES.values()]
AGGREGATIONS = ["token", "sequence", "prompt", "constant"]


@pytest.mark.parametrize("failed", [False, True], ids=["all judged", "some failed"])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_every_advantage_compares_episodes(section: Advantage, failed: bool) -> None:
    one, two = pair(failed=failed)
    for changes in (
        {},
        {"batch_normalized": True},
        {"zero_variance": "skip"},
        {"zero_variance": "exclude"},
        {"truncated": "exclude"},
    ):
        computer = of_advantage(section.model_copy(update=changes))
        of_one, of_two = (computer.compute_advantages(batch) for batch in (one, two))
        for name in ("values", "in_loss", "through_model", "filtered"):
            np.testing.assert_array_equal(getattr(of_one, name)[two.episode], getattr(of_two, name), name)


@pytest.mark.parametrize("failed", [False, True], ids=["all judged", "some failed"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_mean_counts_episodes(aggregation: Any, failed: bool) -> None:
    one, two = pair(failed=failed)
    section = ADVANTAGES["grpo"](aggregation=aggregation)
    for computer in (of_advantage(section), of_advantage(section, overlong=OverlongPenalty(buffer_tokens=18))):
        of_one, of_two = (
            computer.by_token(batch, computer.compute_advantages(batch).values)[batch.loss_mask] for batch in (one, two)
        )
        np.testing.assert_array_equal(of_one, of_two)
        assert np.unique(of_one).size > 3
        assert computer.measured(one) == computer.measured(two)


def test_a_length_penalty_is_on_what_was_sampled() -> None:
    _, two = pair()
    penalty = of_advantage(ADVANTAGES["grpo"](), overlong=OverlongPenalty(buffer_tokens=20)).overlong_penalty(two)
    np.testing.assert_allclose(penalty, -two.answer_lengths / 20, rtol=1e-6)
    assert two.token_kind is not None
    assert (two.answer_lengths < np.diff(two.episode_offsets)).any(), "tools said nothing between turns"


def test_distillation_is_by_token() -> None:
    one, two = (
        dataclasses.replace(batch, teacher_logprobs=np.where(batch.loss_mask, np.float32(-1.0), np.float32(0.0)))
        for batch in pair()
    )
    computer = of_advantage(ADVANTAGES["dr_grpo"](), distillation=Distillation(path="teacher", reward_coefficient=1.0))
    of_one, of_two = (
        computer.by_token(batch, computer.compute_advantages(batch).values)[batch.loss_mask] for batch in (one, two)
    )
    np.testing.assert_array_equal(of_one, of_two)
    assert describe(one, 0)["reverse_kl"] == describe(two, 0)["reverse_kl"]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_mini_batch_holds_whole_episodes_and_the_same_of_them(count: int) -> None:
    one, two = pair(failed=True)
    computer = of_advantage(ADVANTAGES["grpo"](aggregation="sequence", zero_variance="skip"))
    of_one, of_two = (parts_of(computer, batch, count) for batch in (one, two))
    assert len(of_one) == len(of_two)
    for ours, theirs in zip(of_one, of_two, strict=True):
        np.testing.assert_array_equal(ours.episodes, theirs.episodes)
        np.testing.assert_array_equal(ours.advantages[ours.batch.loss_mask], theirs.advantages[theirs.batch.loss_mask])
        assert ours.batch.answer_lengths.tolist() == theirs.batch.answer_lengths.tolist()
        ran, then = (part.counts["num_updated_tokens"] for part in (ours, theirs))
        assert ran == then


def scored(batch: Batch, *, spread: float = 0.4) -> ScoredStep:
    """The batch as the learner hands it to an objective; the same numbers on the same sampled tokens, any between."""
    random, count = np.random.default_rng(5), batch.num_sampled_tokens
    learner, old = (np.full(batch.num_response_tokens, np.nan) for _ in range(2))
    said = batch.rollout_logprobs[batch.loss_mask]
    learner[batch.loss_mask] = said + random.normal(0.0, spread, count)
    old[batch.loss_mask] = said + random.normal(0.0, spread, count)
    computer = of_advantage(ADVANTAGES["grpo"]())
    advantages = computer.by_token(batch, computer.compute_advantages(batch).values)
    return ScoredStep(
        logprobs=torch.from_numpy(learner).float(),
        rollout_logprobs=torch.from_numpy(batch.rollout_logprobs),
        old_logprobs=torch.from_numpy(old).float(),
        advantages=torch.from_numpy(advantages).float(),
        sampled=torch.from_numpy(batch.loss_mask),
        offsets=torch.from_numpy(batch.episode_offsets),
    )


OBJECTIVES: list[Objective] = [
    P3O(),
    P3O(ess_unit="sequence"),
    P4O(),
    Split(),
    Clipped(anchor="old"),
    Decoupled(),
    GSPO(clip_low=0.05, clip_high=0.05),
    GSPO(clip_low=0.05, clip_high=0.05, anchor="rollout"),
    M2PO(),
    MuGRPO(kappa=0.8),
    MuGRPO(kappa=0.8, keeps_trigger=False),
    MuGRPO(kappa=0.8, scope="response"),
    TOPR(),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_an_objective_decides_about_episodes(objective: Objective) -> None:
    one, two = map(scored, pair())
    ours, theirs = objective.prepare(one), objective.prepare(two)
    assert torch.equal(ours.advantages[one.sampled], theirs.advantages[two.sampled])
    assert ours.step_ess == theirs.step_ess
    assert ours.measured == pytest.approx(theirs.measured, rel=1e-12)  # a sum over other places of zeros
    if ours.anchor_logprobs is not None:
        assert theirs.anchor_logprobs is not None
        assert torch.equal(ours.anchor_logprobs[one.sampled], theirs.anchor_logprobs[two.sampled])


CORRECTIONS: list[Correction] = [
    NoCorrection(),
    TIS(level="sequence"),
    Rejection(level="geometric", low=0.9, high=1.1),
    Rejection(veto=0.5),
    MIS(level="sequence", veto=0.3, normalized=True),
    IcePop(),
    OPSM(delta=0.1),
]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=repr)
def test_a_correction_vetoes_episodes(correction: Correction) -> None:
    one, two = map(scored, pair())
    (ours, of_one), (theirs, of_two) = correction.factor(one), correction.factor(two)
    assert torch.equal(ours[one.sampled], theirs[two.sampled])
    assert of_one == pytest.approx(of_two, rel=1e-12)


def update_on(batch: Batch) -> Update:
    step = scored(batch)
    mismatch = Mismatch.of_step(
        StepTokens(
            learner_logprobs=step.logprobs,
            rollout_logprobs=step.rollout_logprobs,
            seen=step.sampled,
            advantages=step.advantages,
            entropy=step.rollout_logprobs.abs(),
            age=torch.zeros(len(step.sampled), dtype=torch.int32),
            place=torch.from_numpy(batch.places),
            offsets=step.offsets,
        )
    )
    return Update(metrics=mismatch.statistics(), histogram=[0.0], device_logprobs=step.logprobs, mismatch=mismatch)


def test_the_statistics_of_sequences_and_places_are_those_of_episodes() -> None:
    one, two = map(update_on, pair())
    assert one.metrics == two.metrics
    assert one.metrics["sequence_ess"] < 1.0
    for name in ("sums", "histogram", "quantiles", "sequences", "update"):
        np.testing.assert_array_equal(getattr(one.mismatch, name), getattr(two.mismatch, name), name)


def test_updates_on_parts_are_merged_by_episode() -> None:
    found = []
    for batch in pair():
        parts = parts_of(of_advantage(ADVANTAGES["grpo"]()), batch, 2)
        update = merge_updates(parts, [update_on(part.batch) for part in parts])
        assert update.mismatch is not None
        assert len(update.mismatch.update) == batch.num_episodes
        found.append((update.metrics, update.mismatch.sequences, ratio_sums(batch, update)))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_equal(ours, theirs)


def test_metrics_count_episodes() -> None:
    one, two = pair(failed=True)
    ours, theirs = describe(one, 3, 0.5), describe(two, 3, 0.5)
    assert (ours["episodes"].pop("rows_mean"), theirs["episodes"].pop("rows_mean")) == (
        1.0,
        two.num_samples / two.num_episodes,
    )
    assert ours == theirs
    assert (ours["verifier_failures"], ours["episodes"]["failures"]) == (3.0, 1.0)
    assert ours["response_tokens_mean"] == one.answer_lengths.mean()
    assert one.episodes is not None
    stopped = ours["episodes"]["stopped"]
    assert sum(stopped.values()) == pytest.approx(1.0)
    assert (stopped["finished"], stopped["wall_clock"]) == (
        float((one.episodes.stopped == StopReason.FINISHED).mean()),
        0.0,
    )
    dropped = (DroppedGroup(group=90, reason="", kind="failed"), DroppedGroup(group=91, reason="", kind="unfit"))
    assert ours["episodes"]["given_up"] == 0.0
    without = describe(dataclasses.replace(one, dropped=dropped), 3, 0.5)
    assert without["episodes"]["given_up"] == 1.0
    found = [{alarm.rule.name for alarm in alarms(line, quantized=False)} for line in (ours, without)]
    assert found[1] - found[0] == {"episodes_given_up"}
    assert asked_solve_rate(one, 0.5) == asked_solve_rate(two, 0.5)
    assert attempts(one, 0.5) == attempts(two, 0.5)
    assert mean_age(one, 2) == mean_age(two, 2)
