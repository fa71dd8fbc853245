"""DAPO's penalty for overlong responses by the numbers of its paper, and the filter that leaves truncated ones out."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from pipeline.advantages.compute import AdvantageComputer
from pipeline.advantages.methods import GRPO, DrGRPO, OverlongPenalty
from pipeline.config.loader import load_recipe
from pipeline.data.batch import Batch
from pipeline.errors import RecipeError
from precision.objectives.objective import Aggregation
from tests.support.batches import batch_of_rewards, parts_of

DAPO = OverlongPenalty(buffer_tokens=4096)
LONGEST = 20_480


def computer(penalty: OverlongPenalty | None = None, **options: Any) -> AdvantageComputer:
    section = DrGRPO.model_validate(dict(aggregation="token") | options)
    return AdvantageComputer(section=section, estimator=section.estimator(), max_new_tokens=9, overlong=penalty)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1, 0.0),
        (16_384, 0.0),  # the paper's expected length
        (16_385, -1 / 4096),
        (18_432, -0.5),
        (20_479, -4095 / 4096),
        (20_480, -1.0),
        (20_481, -1.0),
    ],
)
def test_equation_13(tokens: int, expected: float) -> None:
    assert DAPO.of(np.array([tokens]), max_new_tokens=LONGEST).tolist() == [expected]


def test_half_a_penalty_on_rewards_of_one_and_zero_is_the_papers() -> None:
    """GRPO's z-scores: (r + 1) / 2 of the paper's r, with the penalty halved, has the same advantages."""
    reward, lengths = np.array([1.0, -1.0, 1.0, -1.0], np.float32), np.array([100, 20_480, 18_432, 17_000])
    group, method = np.zeros(4, np.int64), GRPO()
    published = method.advantages(reward + DAPO.of(lengths, max_new_tokens=LONGEST), group)
    half = OverlongPenalty(buffer_tokens=4096, penalty=0.5)
    ours = method.advantages((reward + 1) / 2 + half.of(lengths, max_new_tokens=LONGEST), group)
    np.testing.assert_allclose(ours, published, rtol=1e-4)  # but for the epsilon beside the deviation


def of_lengths(rewards: list[list[float]], truncated: list[int], failed: list[int]) -> Batch:
    """Nobody asks for texts: the lengths are those of the batch."""
    batch = batch_of_rewards(rewards)
    cut = np.isin(np.arange(batch.num_samples), truncated)
    lost = np.isin(np.arange(batch.num_samples), failed)
    return replace(
        batch,
        truncated=cut,
        reward_parts={"verifier_failed": np.where(lost, 1.0, np.nan).astype(np.float32)},
        loss_mask=batch.loss_mask & ~np.repeat(lost, batch.response_lengths),
    )


def test_a_penalty_moves_the_mean_of_its_group_and_not_who_has_solved() -> None:
    batch = batch_of_rewards([[1.0, 1.0, 1.0, 1.0]], seed=3)
    found = computer(OverlongPenalty(buffer_tokens=9)).compute_advantages(batch)
    lost = batch.response_lengths / 9  # the whole length is buffer
    np.testing.assert_allclose(found.values, lost.mean() - lost, rtol=1e-5)
    assert batch.reward.tolist() == [1.0] * 4
    measured = computer(OverlongPenalty(buffer_tokens=9)).measured(batch)
    assert measured["overlong_penalty"] == pytest.approx(-lost.mean())
    assert computer().measured(batch) == {}


def test_a_sample_without_a_reward_is_not_punished_and_no_member() -> None:
    batch = of_lengths([[1.0, 1.0, 0.0]], [], failed=[2])
    punished = computer(OverlongPenalty(buffer_tokens=9, penalty=2.0))
    assert punished.overlong_penalty(batch)[2] == 0.0
    lost = 2.0 * batch.response_lengths[:2] / 9
    found = punished.compute_advantages(batch).values
    np.testing.assert_allclose(found, [*(lost.mean() - lost), 0.0], rtol=1e-5, atol=1e-7)


def test_a_truncated_sample_counts_in_its_group_and_not_in_the_loss() -> None:
    batch = of_lengths([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], truncated=[1, 4, 5], failed=[5])
    kept, excluded = (computer(truncated=choice) for choice in ("keep", "exclude"))
    values = [each.compute_advantages(batch).values.tolist() for each in (kept, excluded)]
    assert values[0] == values[1], "the group is compared whole"
    [part] = parts_of(excluded, batch, 1)
    sampled = np.repeat([True, False, True, True, False, False], batch.response_lengths)
    assert part.batch.loss_mask.tolist() == sampled.tolist()
    assert part.batch.num_sampled_tokens == sampled.sum(), "the denominator"
    assert not part.advantages[~sampled].any()
    assert part.trained is not None
    assert part.trained.tolist() == [True, False, True, True, False, True]
    assert parts_of(kept, batch, 1)[0].batch.loss_mask.tolist() == batch.loss_mask.tolist()


def test_a_group_of_truncated_samples_is_no_part_of_a_step() -> None:
    batch = of_lengths([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], truncated=[2, 3], failed=[])
    parts = parts_of(computer(truncated="exclude"), batch, 3)
    assert [part.episodes.tolist() for part in parts] == [
        [True, True, False, False, False, False],
        [False, False, False, False, True, True],
    ]


def test_a_batch_of_truncated_samples_alone_makes_a_step_without_advantage() -> None:
    batch = of_lengths([[1.0, 0.0], [0.0, 1.0]], truncated=[0, 1, 2, 3], failed=[])
    [part] = parts_of(computer(truncated="exclude"), batch, 1)
    assert part.batch.num_sampled_tokens == batch.num_sampled_tokens
    assert not part.advantages.any()


def test_a_buffer_longer_than_any_response_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"buffer_tokens 17 exceeds rollout.max_new_tokens 16.*a fifth \(3\)"):
        load_recipe(Path("dapo"), ["reward.overlong.buffer_tokens=17"])


@pytest.mark.parametrize(
    ("name", "fits"),
    [(name, True) for name in ("grpo", "dr_grpo", "rloo", "asym_grpo")]
    + [(name, False) for name in ("pass_at_k", "maxrl", "power", "fade", "f_grpo")],
)
def test_who_asks_what_is_solved_takes_no_penalty(name: str, fits: bool) -> None:
    """pass_at_k would take a right answer three tokens into the buffer for a wrong one."""
    overrides = [f"advantage={{name: {name}}}", "reward.overlong={buffer_tokens: 4}", "rollout.group_size=8"]
    refused = pytest.raises(RecipeError, match=rf"advantage.name is {name}, which asks how far a sample is solved")
    with nullcontext() if fits else refused:
        load_recipe(Path("grpo"), overrides)


def test_a_rate_that_would_rise_is_refused() -> None:
    with pytest.raises(
        RecipeError, match=r"learner\.optimizer: min_lr 5e-05 is above lr 1e-05, so that the rate would"
    ):
        load_recipe(Path("demo"), ["learner.optimizer.lr=1e-5"])
    assert load_recipe(Path("demo"), ["learner.optimizer.lr=1e-5", "learner.optimizer.decay=constant"])


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_what_is_left_out_is_in_no_denominator(aggregation: str) -> None:
    """A batch with samples that nothing is learned from is trained on as the batch of the others."""
    batch = of_lengths([[1.0, 0.0, 0.0, 0.0]], truncated=[2], failed=[3])
    [part] = parts_of(computer(truncated="exclude", aggregation=aggregation), batch, 1)
    values = computer().compute_advantages(batch).values
    lengths = batch.response_lengths[:2]
    total = lengths.sum()
    factors = {
        "token": np.ones(2),
        "sequence": total / (2 * lengths),
        "prompt": np.ones(2),
        "constant": np.full(2, total / (2 * 9)),
    }[aggregation]
    expected = np.repeat(values[:2] * factors, lengths)
    np.testing.assert_allclose(part.advantages[: len(expected)], expected, rtol=1e-6)
    assert not part.advantages[len(expected) :].any()
