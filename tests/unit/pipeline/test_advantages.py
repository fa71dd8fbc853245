"""Advantages: hand-computed groups, and what must hold of any rewards."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from pipeline.advantages import ADVANTAGES, GRPO_EPSILON, estimator, grpo, grpo_mean, rloo
from pipeline.errors import NonFiniteError, RecipeError

Rewards = NDArray[np.float32]
Groups = NDArray[np.int64]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Rewards, Groups]:
    """Groups of different sizes, interleaved, with ids far apart."""
    size = draw(st.integers(1, 24))
    group = draw(npst.arrays(np.int64, size, elements=st.sampled_from([0, 3, 7, 10**12])))
    reward = draw(npst.arrays(np.float32, size, elements=st.integers(-8, 8).map(lambda quarter: quarter / 4)))
    return reward, group


def test_goldens() -> None:
    """Group 4: rewards 1, 0, 0, 1, mean 1/2, sample std sqrt(4 · 1/4 / 3) = 1/sqrt(3). Group 9: 1, 0, 0, mean 1/3,
    sample std sqrt((4/9 + 1/9 + 1/9) / 2) = 1/sqrt(3)."""
    reward = np.array([1, 0, 1, 0, 0, 1, 0], np.float32)
    group = np.array([4, 4, 9, 4, 9, 4, 9], np.int64)
    half, third = 0.5 * math.sqrt(3), math.sqrt(3) / 3
    expected = [half, -half, 2 * third, -half, -third, half, -third]
    np.testing.assert_allclose(grpo(reward, group), expected, rtol=3e-6)
    np.testing.assert_allclose(
        grpo_mean(reward, group), [1 / 2, -1 / 2, 2 / 3, -1 / 2, -1 / 3, 1 / 2, -1 / 3], rtol=1e-6
    )
    # rloo by its definition: 1 - 1/3, 0 - 2/3; 1 - 0, 0 - 1/2.
    np.testing.assert_allclose(rloo(reward, group), [2 / 3, -2 / 3, 1, -2 / 3, -1 / 2, 2 / 3, -1 / 2], rtol=1e-6)


def test_grpo_divides_by_the_sample_standard_deviation_plus_epsilon() -> None:
    reward = np.array([0.25, 1.0, -2.0, 3.5], np.float32)
    expected = (reward - reward.mean()) / (np.std(reward, ddof=1) + GRPO_EPSILON)
    np.testing.assert_allclose(grpo(reward, np.zeros(4, np.int64)), expected, rtol=1e-6)
    tiny = np.array([0.0, 1e-6], np.float32)  # std 7.07e-7, of the size of epsilon
    assert grpo(tiny, np.zeros(2, np.int64))[1] == pytest.approx(0.5e-6 / (1e-6 / math.sqrt(2) + 1e-6), rel=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.3e7, 1e-30])
def test_a_constant_group_and_a_group_of_one_say_nothing(name: str, value: float) -> None:
    reward = np.array([value] * 7 + [5.0], np.float32)
    assert not ADVANTAGES[name](reward, np.array([1] * 7 + [2], np.int64)).any()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_empty_batch_has_no_advantages(name: str) -> None:
    assert ADVANTAGES[name](np.zeros(0, np.float32), np.zeros(0, np.int64)).shape == (0,)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(batch=batches(), order=st.randoms(use_true_random=False), shift=st.integers(-5, 5))
def test_any_estimator(name: str, batch: tuple[Rewards, Groups], order: object, shift: int) -> None:
    reward, group = batch
    advantage = ADVANTAGES[name](reward, group)
    assert (advantage.dtype, advantage.shape) == (np.float32, reward.shape)
    permutation = list(range(len(reward)))
    order.shuffle(permutation)  # type: ignore[attr-defined]
    shuffled = ADVANTAGES[name](reward[permutation], group[permutation])
    np.testing.assert_allclose(shuffled, advantage[permutation], atol=1e-6)
    shifted = ADVANTAGES[name]((reward + shift).astype(np.float32), group)
    np.testing.assert_allclose(shifted, advantage, atol=1e-5)
    for each in np.unique(group):
        members = group == each
        assert advantage[members].sum() == pytest.approx(0.0, abs=1e-4)
        alone = ADVANTAGES[name](reward[members], group[members])
        np.testing.assert_allclose(alone, advantage[members], atol=1e-6)


@given(batch=batches())
def test_rloo_is_the_mean_of_the_others_and_a_rescaled_grpo_mean(batch: tuple[Rewards, Groups]) -> None:
    reward, group = batch
    for sample in range(len(reward)):
        others = (group == group[sample]) & (np.arange(len(reward)) != sample)
        if others.any():
            assert rloo(reward, group)[sample] == pytest.approx(reward[sample] - reward[others].mean(), abs=1e-5)
            size = others.sum() + 1
            assert rloo(reward, group)[sample] == pytest.approx(
                grpo_mean(reward, group)[sample] * size / (size - 1), abs=1e-5
            )


@given(batch=batches(), scale=st.sampled_from([0.5, 2.0, 64.0]))
def test_grpo_does_not_feel_the_scale_of_rewards(batch: tuple[Rewards, Groups], scale: float) -> None:
    reward, group = batch
    scaled = grpo((reward * scale).astype(np.float32), group)
    np.testing.assert_allclose(scaled, grpo(reward, group), atol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_reward_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    with pytest.raises(NonFiniteError, match="reward of sample 1 is"):
        ADVANTAGES[name](np.array([0, bad], np.float32), np.zeros(2, np.int64))


def test_shapes_must_agree_and_names_are_known() -> None:
    with pytest.raises(ValueError, match="expected the same"):
        grpo(np.zeros(3, np.float32), np.zeros(2, np.int64))
    assert estimator("rloo") is rloo
    with pytest.raises(RecipeError, match="'ppo', expected one of grpo, grpo_mean, rloo"):
        estimator("ppo")
