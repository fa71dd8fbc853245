"""What replaying the engine's experts changes, measured on some samples of a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.data.batch import Batch
from pipeline.data.routed_experts import RoutedExperts
from pipeline.trainer.replay_effect import LEAST, SHARE, ReplayEffect, spread_samples
from tests.support.batches import batch_of_rewards


class Learner:
    """Off by 0.5 nats where it routes by itself, and by `off` where it is told."""

    def __init__(self, off: float) -> None:
        self.off = off
        self.asked: list[Batch] = []

    def score(self, batch: Batch) -> Any:
        self.asked.append(batch)
        return torch.from_numpy(batch.rollout_logprobs + np.float32(0.5 if batch.experts is None else self.off))


def batch(samples: int) -> Batch:
    plain = batch_of_rewards([[0.0] * 4] * (samples // 4), unsampled=0.2)
    ids = np.zeros((len(plain.tokens), 1, 1), np.uint8)
    return replace(plain, experts=RoutedExperts(ids=ids, known=np.ones(len(plain.tokens), np.bool_)))


def test_some_samples_are_scored_with_the_learners_own_experts_before_the_step() -> None:
    learner, whole = Learner(off=0.1), batch(4 * 5 * SHARE)
    effect = ReplayEffect.before_step(learner, whole)  # type: ignore[arg-type]
    assert effect is not None
    assert [asked.num_samples for asked in learner.asked] == [20]
    assert learner.asked[0].experts is None
    found = effect.measured(whole, learner.score(whole))
    assert found["log_ratio_abs_mean_with_replay"] == pytest.approx(0.1, rel=1e-4)
    assert found["log_ratio_abs_mean_without_replay"] == pytest.approx(0.5, rel=1e-4)
    # k3 of a constant log-ratio l is exp(l) - 1 - l.
    assert found["k3_kl_without_replay"] == pytest.approx(np.exp(0.5) - 1.5, rel=1e-4)
    assert found["ess_with_replay"] == pytest.approx(1.0)


def test_tokens_that_the_step_left_out_do_not_count() -> None:
    learner, whole = Learner(off=0.0), batch(LEAST)
    effect = ReplayEffect.before_step(learner, whole)  # type: ignore[arg-type]
    assert effect is not None
    assert effect.part.num_samples == LEAST
    scored = torch.where(torch.arange(whole.num_response_tokens) < 9, learner.score(whole), torch.nan)
    assert effect.measured(whole, scored)["ess_with_replay"] == pytest.approx(1.0)
    assert effect.measured(whole, torch.full_like(scored, torch.nan)) == {}


def test_a_batch_without_recorded_experts_costs_nothing() -> None:
    learner = Learner(off=0.0)
    assert ReplayEffect.before_step(learner, replace(batch(8), experts=None)) is None  # type: ignore[arg-type]
    assert learner.asked == []


@pytest.mark.parametrize(("count", "wanted"), [(1, 1), (LEAST - 1, LEAST - 1), (100, LEAST), (40 * SHARE, 40)])
def test_chosen_samples_are_spread_over_the_batch(count: int, wanted: int) -> None:
    chosen = np.flatnonzero(spread_samples(count))
    assert len(chosen) == wanted
    assert (chosen[0], chosen[-1]) == (0, count - 1)
    assert wanted == 1 or np.diff(chosen).max() <= -(-count // wanted) + 1
