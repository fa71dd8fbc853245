"""Formulas of advantages: hand-computed groups, and what must hold of any rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray
from pydantic import TypeAdapter

from pipeline.advantages.methods import (
    FADE,
    FGRPO,
    GRPO,
    GRPO_EPSILON,
    RLOO,
    AsymGRPO,
    DrGRPO,
    FADEEstimator,
    MaxRL,
    PassAtK,
    Power,
    weight_curves,
)
from pipeline.config.algorithm import AdvantageSection
from pipeline.config.loader import recipe_from
from pipeline.data.batch import Batch
from pipeline.errors import CorruptCheckpointError, NonFiniteError, RecipeError

Rewards = NDArray[np.float32]
Groups = NDArray[np.int64]
Formula = Callable[[Rewards, Groups], Rewards]

ANY_REWARD: dict[str, Formula] = {
    "grpo": GRPO().advantages,
    "dr_grpo": DrGRPO().advantages,
    "rloo": RLOO().advantages,
    "asym": AsymGRPO(delta=0.5).advantages,
}
SOLVE_RATE: dict[str, Formula] = {
    "maxrl": MaxRL().advantages,
    "f_grpo": FGRPO(gamma=0.5).advantages,
    "power": Power(alpha=2.5, delta=0.4).advantages,
}
RAGGED = ANY_REWARD | SOLVE_RATE
ALL = RAGGED | {"pass_at_k": PassAtK(k=1).advantages}

REWARD = np.array([1, 0, 1, 0, 0, 1, 0], np.float32)
GROUP = np.array([4, 4, 9, 4, 9, 4, 9], np.int64)
"""Group 4: 1, 0, 0, 1, mean 1/2; group 9: 1, 0, 0, mean 1/3. Sample std of both 1/sqrt(3):
sqrt(4 · 1/4 / 3) and sqrt((4/9 + 1/9 + 1/9) / 2)."""


@st.composite
def batches(draw: st.DrawFn, smallest: int = -8, largest: int = 8) -> tuple[Rewards, Groups]:
    """Groups of different sizes, interleaved, with ids far apart; rewards in quarters."""
    size = draw(st.integers(1, 24))
    group = draw(npst.arrays(np.int64, size, elements=st.sampled_from([0, 3, 7, 10**12])))
    reward = draw(
        npst.arrays(np.float32, size, elements=st.integers(smallest, largest).map(lambda quarter: quarter / 4))
    )
    return reward, group


HALF, THIRD = math.sqrt(3) / 2, math.sqrt(3) / 3
GOLDENS: dict[str, tuple[Formula, list[float]]] = {
    "grpo": (GRPO().advantages, [HALF, -HALF, 2 * THIRD, -HALF, -THIRD, HALF, -THIRD]),
    "dr_grpo": (DrGRPO().advantages, [1 / 2, -1 / 2, 2 / 3, -1 / 2, -1 / 3, 1 / 2, -1 / 3]),
    # By its definition: 1 - 1/3, 0 - 2/3; 1 - 0, 0 - 1/2.
    "rloo": (RLOO().advantages, [2 / 3, -2 / 3, 1, -2 / 3, -1 / 2, 2 / 3, -1 / 2]),
    # (1/2) / (1/2); (2/3) / (1/3), (-1/3) / (1/3).
    "maxrl": (MaxRL().advantages, [1, -1, 2, -1, -1, 1, -1]),
    # grpo × sqrt(1/2) and × sqrt(2/3).
    "f_grpo": (
        FGRPO(gamma=0.5).advantages,
        [
            HALF * math.sqrt(1 / 2),
            -HALF * math.sqrt(1 / 2),
            2 * THIRD * math.sqrt(2 / 3),
            -HALF * math.sqrt(1 / 2),
            -THIRD * math.sqrt(2 / 3),
            HALF * math.sqrt(1 / 2),
            -THIRD * math.sqrt(2 / 3),
        ],
    ),
    # dr_grpo, negative ones doubled.
    "asym_grpo": (AsymGRPO(delta=0.5).advantages, [1 / 2, -1, 2 / 3, -1, -2 / 3, 1 / 2, -2 / 3]),
    # The same × (1/2)^2 and × (2/3)^2.
    "power": (Power(alpha=3.0, delta=0.5).advantages, [1 / 8, -1 / 4, 8 / 27, -1 / 4, -8 / 27, 1 / 8, -8 / 27]),
    # k = 2. Group 4 (2 of 4): solved 2 C(2,2)/C(3,2) = 2/3; failed 2 (C(1,2)/C(3,2) - C(1,1)/C(3,1)) = -2/3.
    # Group 9 (1 of 3): solved 2 C(2,2)/C(2,2) = 2; failed 2 (C(1,2)/C(2,2) - C(1,1)/C(2,1)) = -1.
    "pass_at_k": (PassAtK(k=2).advantages, [2 / 3, -2 / 3, 2, -2 / 3, -1, 2 / 3, -1]),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(name: str) -> None:
    formula, expected = GOLDENS[name]
    np.testing.assert_allclose(formula(REWARD, GROUP), expected, rtol=3e-6)


@pytest.mark.parametrize("name", ["grpo", "maxrl", "f_grpo", "power", "pass_at_k"])
def test_rewards_of_minus_one_and_one_are_those_of_zero_and_one(name: str) -> None:
    """grpo up to its epsilon (the std doubles too), the others exactly; a difference of rewards doubles instead."""
    formula, expected = GOLDENS[name]
    np.testing.assert_allclose(formula(2 * REWARD - 1, GROUP), expected, rtol=3e-6)


def test_partial_credit_counts_in_full_where_a_solve_rate_is_asked() -> None:
    """Rewards .5 and 0: mean 1/4; maxrl ±(1/4)/(1/4); power alpha 2: ±(1/4)(3/4). A bonus above 1 counts as 1."""
    reward, group = np.array([0.5, 0.0], np.float32), np.zeros(2, np.int64)
    np.testing.assert_allclose(MaxRL().advantages(reward, group), [1, -1])
    np.testing.assert_allclose(Power(alpha=2.0, delta=1.0).advantages(reward, group), [3 / 16, -3 / 16])
    np.testing.assert_allclose(
        Power(alpha=2.0, delta=1.0).advantages(np.array([7.0, 0.0], np.float32), group), [1 / 4, -1 / 4]
    )


def test_partial_credit_is_a_failure_to_pass_at_k() -> None:
    reward = np.where(REWARD > 0.0, 1.5, 0.75).astype(np.float32)
    np.testing.assert_allclose(PassAtK(k=2).advantages(reward, GROUP), GOLDENS["pass_at_k"][1], rtol=3e-6)


def test_grpo_divides_by_the_sample_standard_deviation_plus_epsilon() -> None:
    reward = np.array([0.25, 1.0, -2.0, 3.5], np.float32)
    expected = (reward - reward.mean()) / (np.std(reward, ddof=1) + GRPO_EPSILON)
    np.testing.assert_allclose(GRPO().advantages(reward, np.zeros(4, np.int64)), expected, rtol=1e-6)
    tiny = np.array([0.0, 1e-6], np.float32)  # std 7.07e-7, of the size of epsilon
    assert GRPO().advantages(tiny, np.zeros(2, np.int64))[1] == pytest.approx(
        0.5e-6 / (1e-6 / math.sqrt(2) + 1e-6), rel=1e-5
    )


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.3e7, 1e-30])
def test_a_constant_group_and_a_group_of_one_say_nothing(name: str, value: float) -> None:
    reward = np.array([value] * 7 + [5.0], np.float32)
    assert not RAGGED[name](reward, np.array([1] * 7 + [2], np.int64)).any()


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_constant_group_says_nothing_about_pass_at_k(k: int, value: float) -> None:
    assert not PassAtK(k=k).advantages(np.full(6, value, np.float32), np.zeros(6, np.int64)).any()


@pytest.mark.parametrize("name", ALL)
def test_an_empty_batch_has_no_advantages(name: str) -> None:
    assert ALL[name](np.zeros(0, np.float32), np.zeros(0, np.int64)).shape == (0,)


@pytest.mark.parametrize("name", RAGGED)
@given(batch=batches(), order=st.randoms(use_true_random=False))
def test_samples_may_come_in_any_order_and_groups_do_not_feel_each_other(
    name: str, batch: tuple[Rewards, Groups], order: object
) -> None:
    reward, group = batch
    advantage = RAGGED[name](reward, group)
    assert (advantage.dtype, advantage.shape) == (np.float64, reward.shape)
    permutation = list(range(len(reward)))
    order.shuffle(permutation)  # type: ignore[attr-defined]
    shuffled = RAGGED[name](reward[permutation], group[permutation])
    np.testing.assert_allclose(shuffled, advantage[permutation], atol=1e-6)
    for each in np.unique(group):
        members = group == each
        alone = RAGGED[name](reward[members], group[members])
        np.testing.assert_allclose(alone, advantage[members], atol=1e-6)
        # A better reward never has a smaller advantage.
        ranked = advantage[members][np.argsort(reward[members], kind="stable")]
        assert (np.diff(ranked) >= -1e-6).all()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "f_grpo"])
@given(batch=batches())
def test_a_group_sums_to_zero_where_successes_and_failures_weigh_the_same(
    name: str, batch: tuple[Rewards, Groups]
) -> None:
    advantage = RAGGED[name](*batch)
    for each in np.unique(batch[1]):
        assert advantage[batch[1] == each].sum() == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("name", ANY_REWARD)
@given(batch=batches(), shift=st.integers(-5, 5), scale=st.sampled_from([0.5, 2.0, 64.0]))
def test_shift_and_scale_of_rewards(name: str, batch: tuple[Rewards, Groups], shift: int, scale: float) -> None:
    """None feels a shift; grpo feels no scale, the others are proportional to it."""
    reward, group = batch
    advantage = ANY_REWARD[name](reward, group)
    np.testing.assert_allclose(ANY_REWARD[name]((reward + shift).astype(np.float32), group), advantage, atol=1e-5)
    scaled = ANY_REWARD[name]((reward * scale).astype(np.float32), group)
    np.testing.assert_allclose(scaled, advantage * (1.0 if name == "grpo" else scale), rtol=1e-5, atol=1e-4)


@given(batch=batches())
def test_rloo_is_the_mean_of_the_others_and_a_rescaled_dr_grpo(batch: tuple[Rewards, Groups]) -> None:
    reward, group = batch
    for sample in range(len(reward)):
        others = (group == group[sample]) & (np.arange(len(reward)) != sample)
        if others.any():
            assert RLOO().advantages(reward, group)[sample] == pytest.approx(
                reward[sample] - reward[others].mean(), abs=1e-5
            )
            size = others.sum() + 1
            assert RLOO().advantages(reward, group)[sample] == pytest.approx(
                DrGRPO().advantages(reward, group)[sample] * size / (size - 1), abs=1e-5
            )


@given(solved=st.lists(st.booleans(), min_size=2, max_size=7), k=st.integers(1, 4))
def test_pass_at_k_against_enumeration_of_subsets(solved: list[bool], k: int) -> None:
    """Of every sample: k × (mean over subsets of k that hold it of "any solved" - the same over those that do not)."""
    size = len(solved)
    assume(size > k)
    reward = np.array(solved, np.float32)
    expected = []
    for sample in range(size):
        with_it = [any(solved[i] for i in s) for s in combinations(range(size), k) if sample in s]
        without = [any(solved[i] for i in s) for s in combinations(range(size), k) if sample not in s]
        expected.append(k * (np.mean(with_it) - np.mean(without)))
    advantage = PassAtK(k=k).advantages(reward, np.zeros(size, np.int64))
    np.testing.assert_allclose(advantage, expected, atol=1e-6)
    assert advantage.sum() == pytest.approx(0.0, abs=1e-5)


@given(batch=batches(0, 4))
def test_pass_at_1_is_rloo(batch: tuple[Rewards, Groups]) -> None:
    solved = (batch[0] >= 1.0).astype(np.float32)
    reward, group = np.concatenate([solved, solved[::-1]]), np.tile(batch[1], 2)  # no group of one
    np.testing.assert_allclose(PassAtK(k=1).advantages(reward, group), RLOO().advantages(reward, group), atol=1e-6)


@given(batch=batches(-4, 4), alpha=st.floats(1.0, 4.0), delta=st.floats(0.3, 1.0))
def test_power_has_the_others_as_its_cases(batch: tuple[Rewards, Groups], alpha: float, delta: float) -> None:
    """F-GRPO and Power are the same focus on two bases; alpha 1 is AsymGRPO, and with delta 1 Dr. GRPO."""
    reward, group = batch[0].clip(0.0, 1.0), batch[1]
    np.testing.assert_allclose(
        Power(alpha=1.0, delta=delta).advantages(reward, group), AsymGRPO(delta=delta).advantages(reward, group)
    )
    np.testing.assert_allclose(
        Power(alpha=1.0, delta=1.0).advantages(reward, group), DrGRPO().advantages(reward, group), rtol=1e-6
    )
    focused = Power(alpha=alpha, delta=1.0).advantages(reward, group).astype(np.float64)
    np.testing.assert_allclose(
        focused * GRPO().advantages(reward, group),
        FGRPO(gamma=alpha - 1.0).advantages(reward, group).astype(np.float64) * DrGRPO().advantages(reward, group),
        atol=1e-6,
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ALL)
def test_a_reward_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    with pytest.raises(NonFiniteError, match="reward of sample 1 is"):
        ALL[name](np.array([0, bad], np.float32), np.zeros(2, np.int64))


def test_pass_at_k_needs_more_than_k_samples() -> None:
    with pytest.raises(RecipeError, match=r"advantage\.k is 3, but a group has 3 samples and needs at least 4"):
        PassAtK(k=3).advantages(np.zeros(7, np.float32), np.array([0, 0, 0, 0, 1, 1, 1], np.int64))


@pytest.mark.parametrize(("k", "group_size", "least"), [(4, 4, 5), (1, 1, 2)])
def test_a_recipe_whose_groups_are_too_small_is_refused(k: int, group_size: int, least: int) -> None:
    recipe = dict(
        run=dict(name="a", steps=1),
        model=dict(path="m"),
        task=dict(name="sort_digits"),
        rollout=dict(group_size=group_size),
        advantage=dict(name="pass_at_k", k=k),
    )
    with pytest.raises(RecipeError, match=f"group_size is {group_size}.*use at least {least}"):
        recipe_from(recipe, source="test")


MakeBatch = Callable[..., Batch]


def fade(**options: object) -> FADEEstimator:
    return FADE.model_validate(options).estimator()


def test_a_run_begins_at_alpha_three_halves_and_delta_one() -> None:
    """3 (1 - .5) / (2 · .5) = 1.5; no entropy is known yet."""
    assert fade().as_power() == Power(alpha=1.5, delta=1.0)
    assert (fade(alpha_max=1.25).as_power().alpha, fade(target_entropy=9.0).as_power().delta) == (1.25, 1.0)


@pytest.mark.parametrize(
    ("solve_rate", "alpha"),
    [(0.0, 3.0), (0.2, 3.0), (1 / 3, 3.0), (0.4, 2.25), (0.5, 1.5), (0.6, 1.0), (0.9, 1.0), (1.0, 1.0)],
)
def test_alpha_follows_the_solve_rate(solve_rate: float, alpha: float) -> None:
    """At .4: 3 · .6 / .8 = 2.25; 3 up to a third, 1 from .6 on."""
    run = fade(smoothing=1.0)
    run.observe(solve_rate=solve_rate, entropy=1.0)
    assert run.as_power().alpha == pytest.approx(alpha)


def test_delta_follows_the_entropy_below_its_target() -> None:
    """First entropy 1.6, so H* = .8: delta = clip(1 + Ĥ - .8, .3, 1)."""
    run = fade(smoothing=1.0)
    for entropy, delta in ((1.6, 1.0), (0.8, 1.0), (0.5, 0.7), (0.2, 0.4), (0.0, 0.3), (0.75, 0.95)):
        run.observe(solve_rate=0.5, entropy=entropy)
        assert run.as_power().delta == pytest.approx(delta)
    assert run.measured()["advantage_target_entropy"] == 0.8


def test_a_target_of_the_recipe_replaces_the_first_entropy() -> None:
    run = fade(smoothing=1.0, target_entropy=1.3, delta_min=0.5)
    run.observe(solve_rate=0.5, entropy=0.9)
    assert run.as_power().delta == pytest.approx(0.6)
    run.observe(solve_rate=0.5, entropy=0.1)
    assert run.as_power().delta == 0.5


def test_smoothing_by_hand_in_both_conventions() -> None:
    """beta .25, solve rates 1 then 0 after .5; entropies 2 (the first is taken as it is) then 1.

    old: .75 · .5 + .25 · 1 = .625, .75 · .625 = .46875; .75 · 2 + .25 · 1 = 1.75.
    new: .25 · .5 + .75 · 1 = .875, .25 · .875 = .21875; .25 · 2 + .75 · 1 = 1.25.
    """
    for keeps, solve_rate, entropy in (("old", 0.46875, 1.75), ("new", 0.21875, 1.25)):
        run = fade(smoothing=0.25, smoothing_keeps=keeps)
        run.observe(solve_rate=1.0, entropy=2.0)
        assert run.measured()["advantage_entropy"] == 2.0
        run.observe(solve_rate=0.0, entropy=1.0)
        measured = run.measured()
        assert measured["advantage_solve_rate"] == pytest.approx(solve_rate)
        assert measured["advantage_entropy"] == pytest.approx(entropy)
        assert measured["advantage_target_entropy"] == 1.0


def test_advantages_are_those_of_power_at_the_moment(make_batch: MakeBatch) -> None:
    batch, run = make_batch(), fade(smoothing=1.0)
    run.observe(solve_rate=0.4, entropy=1.0)
    run.observe(solve_rate=0.4, entropy=0.1)  # alpha 2.25, delta 1 + .1 - .5 = .6
    assert run.as_power().alpha == pytest.approx(2.25)
    assert run.as_power().delta == pytest.approx(0.6)
    expected = Power(alpha=2.25, delta=0.6).advantages(batch.reward, batch.group)
    np.testing.assert_allclose(run.advantages(batch.reward, batch.group), expected, rtol=1e-6)
    np.testing.assert_array_equal(run.advantages(batch.reward, batch.group), run.advantages(batch.reward, batch.group))


observations = st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 4.0)), max_size=12)


@given(before=observations, after=observations, keeps=st.sampled_from(["old", "new"]), target=st.none() | st.just(0.7))
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    before: list[tuple[float, float]], after: list[tuple[float, float]], keeps: str, target: float | None
) -> None:
    options = dict(smoothing_keeps=keeps, target_entropy=target, smoothing=0.2)
    straight, resumed = fade(**options), fade(**options)
    for solve_rate, entropy in before:
        straight.observe(solve_rate=solve_rate, entropy=entropy)
    resumed.restore(json.loads(json.dumps(straight.state())))
    for solve_rate, entropy in after:
        for run in (straight, resumed):
            run.observe(solve_rate=solve_rate, entropy=entropy)
    assert resumed.measured() == straight.measured()
    assert 1.0 <= resumed.as_power().alpha <= 3.0
    assert 0.3 <= resumed.as_power().delta <= 1.0


def test_the_target_of_a_recipe_holds_whatever_the_state_says() -> None:
    """A fork may have another one; one that names none goes on with that of its parent."""
    before = fade(target_entropy=0.7)
    before.observe(solve_rate=0.5, entropy=1.0)
    for target, held in ((1.3, 1.3), (None, 0.7)):
        forked = fade(target_entropy=target)
        forked.restore(before.state())
        assert forked.measured()["advantage_target_entropy"] == held


def test_an_empty_state_begins_anew_and_a_foreign_one_is_refused() -> None:
    run = fade(smoothing=1.0)
    run.observe(solve_rate=0.0, entropy=1.0)
    run.restore({})
    assert run.measured() == fade().measured()
    with pytest.raises(CorruptCheckpointError, match="holds learning_rate but no advantage_solve_rate"):
        run.restore({"learning_rate": 1.0})


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(NonFiniteError, match="entropy of the step is nan"):
        fade().observe(solve_rate=0.5, entropy=math.nan)
    for solve_rate in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="expected a share"):
            fade().observe(solve_rate=solve_rate, entropy=1.0)


SECTION: TypeAdapter[Any] = TypeAdapter(AdvantageSection)
P = np.linspace(0.0, 1.0, 21)
Q = 1.0 - P


@pytest.mark.parametrize("group_size", [2, 5, 8])
def test_finite_groups_by_hand(group_size: int) -> None:
    """Over a binomial c of G: E[c/G (1 - c/G)] = pq (1 - 1/G), which rloo makes good; maxrl misses what no group can
    show, E[(1 - c/G) 1(c > 0)] = q - q^G, the gradient of log p to order G - 1; pass@k is exact at every size."""
    for section, expected in (
        (dict(name="dr_grpo"), P * Q * (1 - 1 / group_size)),
        (dict(name="rloo"), P * Q),
        (dict(name="maxrl"), Q - Q**group_size),
        (dict(name="pass_at_k", k=group_size - 1), (group_size - 1) * P * Q ** (group_size - 1)),
    ):
        for found in weight_curves(SECTION.validate_python(section), P, group_size):
            np.testing.assert_allclose(found, expected, atol=1e-6)
