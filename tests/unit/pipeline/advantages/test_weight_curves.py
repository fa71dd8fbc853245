"""WeightCurves m_S and m_F: closed forms against enumeration, random groups, and the identities between methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pipeline.advantages.methods.fade import FADE
from pipeline.advantages.weight_curves import (
    WeightCurves,
    binomial_weight_curves,
    empirical_weight_curves,
    weight_curves,
)
from pipeline.config.algorithm import AdvantageSection

SECTION: TypeAdapter[Any] = TypeAdapter(AdvantageSection)
P = np.linspace(0.0, 1.0, 21)
Q = 1.0 - P


def of(p: Any = P, group_size: int | None = None, **section: object) -> WeightCurves:
    advantage = SECTION.validate_python(section)
    if group_size is not None:
        return binomial_weight_curves(advantage, np.asarray(p), group_size)
    found = weight_curves(advantage, np.asarray(p))
    assert found is not None
    return found


SECTIONS: list[dict[str, Any]] = [
    dict(name="grpo"),
    dict(name="dr_grpo"),
    dict(name="rloo"),
    dict(name="maxrl"),
    dict(name="pass_at_k", k=4),
    dict(name="f_grpo", gamma=1.5),
    dict(name="asym_grpo", delta=0.5),
    dict(name="power", alpha=2.0, delta=0.4),
    dict(name="fade"),
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: str(section["name"]))
def test_closed_forms_are_the_limit_of_large_groups(section: dict[str, Any]) -> None:
    p = np.array([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
    limit = of(p, **section)
    for group_size, bound in ((32, 0.06), (512, 0.004)):
        finite = of(p, group_size, **section)
        assert np.abs(finite.success - limit.success).max() < bound
        assert np.abs(finite.failure - limit.failure).max() < bound * max(1.0, 1 / section.get("delta", 1.0))


def test_goldens_at_a_quarter() -> None:
    """p = 1/4, q = 3/4: sqrt(3)/4, 3/16, 3/4; pass@2 2 · 1/4 · 9/16; f_grpo sqrt(3)/4 · 9/16; power alpha 2 9/64."""
    for section, success, failure in (
        (dict(name="grpo"), 3**0.5 / 4, 3**0.5 / 4),
        (dict(name="dr_grpo"), 3 / 16, 3 / 16),
        (dict(name="rloo"), 3 / 16, 3 / 16),
        (dict(name="maxrl"), 3 / 4, 3 / 4),
        (dict(name="pass_at_k", k=2), 9 / 32, 9 / 32),
        (dict(name="f_grpo", gamma=2), 3**0.5 / 4 * 9 / 16, 3**0.5 / 4 * 9 / 16),
        (dict(name="asym_grpo", delta=0.5), 3 / 16, 3 / 8),
        (dict(name="power", alpha=2, delta=0.5), 9 / 64, 9 / 32),
    ):
        found = of([0.25], **section)  # type: ignore[arg-type]
        assert (found.success[0], found.failure[0]) == pytest.approx((success, failure))


@given(alpha=st.floats(1.0, 3.0), delta=st.floats(0.3, 1.0))
def test_fade_weighs_p_q_alpha_and_that_over_delta(alpha: float, delta: float) -> None:
    """Its schedule turned until it stands at (alpha, delta): alpha = 3 (1 - p̂) / (2 p̂), delta = 1 + Ĥ - H*."""
    run = FADE(smoothing=1.0, target_entropy=2.0).estimator()
    run.observe(solve_rate=3.0 / (2.0 * alpha + 3.0), entropy=1.0 + delta)
    success, failure = run.as_power().closed_form(P)
    np.testing.assert_allclose(success, P * Q**alpha, atol=1e-9)
    np.testing.assert_allclose(failure, P * Q**alpha / delta, atol=1e-9)
    if alpha > 1.0:
        fine = np.linspace(0.0, 1.0, 20001)
        assert fine[run.as_power().closed_form(fine)[0].argmax()] == pytest.approx(1.0 / (1.0 + alpha), abs=1e-3)


def test_identities_between_methods() -> None:
    """pass@k is k times Power with alpha = k; F-GRPO is GRPO, as Power is Dr. GRPO, times q^gamma; AsymGRPO is Power
    with alpha 1; MaxRL is GRPO squared over its success rate."""
    for k in (1, 2, 5):
        np.testing.assert_allclose(of(name="pass_at_k", k=k).success, k * of(name="power", alpha=k).success)
        focus = Q ** (k - 1)
        np.testing.assert_allclose(of(name="f_grpo", gamma=k - 1).success, of(name="grpo").success * focus)
        np.testing.assert_allclose(of(name="power", alpha=k).success, of(name="dr_grpo").success * focus)
    asym, power = of(name="asym_grpo", delta=0.4), of(name="power", alpha=1, delta=0.4)
    np.testing.assert_allclose(asym.failure, power.failure)
    np.testing.assert_allclose(of(name="maxrl").success * P, of(name="grpo").success ** 2)


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
        found = of(P, group_size, **section)
        np.testing.assert_allclose(found.success, expected, atol=1e-6)
        np.testing.assert_allclose(found.failure, expected, atol=1e-6)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: str(section["name"]))
def test_random_groups_have_the_masses_of_finite_groups(section: dict[str, Any]) -> None:
    """20,000 groups of 6 with p = .3; the mean of 20,000 weight_curves below 3 errs by less than .02 almost always."""
    rng, size, num = np.random.default_rng(7), 6, 20_000
    reward = (rng.random(size * num) < 0.3).astype(np.float32)
    group = np.repeat(np.arange(num), size)
    advantage = SECTION.validate_python(section).advantages(reward, group).astype(np.float64)
    expected = of([0.3], size, **section)
    assert np.sum(advantage * reward) / len(reward) == pytest.approx(expected.success[0], abs=0.02)
    assert -np.sum(advantage * (1 - reward)) / len(reward) == pytest.approx(expected.failure[0], abs=0.02)


def test_empirical_masses_by_hand() -> None:
    """Two groups solve 1 of 2, one solves 1 of 3 and one none of 2. Of the first two, successes weigh 4/2 and 2/2, mean
    1.5, failures 3/2 and 1/2, mean 1; of the third, 6/3 and (1 + 2)/3; the last one's failures weigh 5 · 2 / 2."""
    reward = np.array([1, 0, 0, 1, 1, 0, 0, 0, 0], np.float32)
    group = np.array([5, 5, 6, 6, 7, 7, 7, 8, 8], np.int64)
    advantage = np.array([4, -3, -1, 2, 6, -1, -2, -5, -5], np.float32)
    found = empirical_weight_curves(advantage, reward, group)
    np.testing.assert_allclose(found.p, [0, 1 / 3, 1 / 2])
    np.testing.assert_allclose(found.success, [0, 2, 1.5])
    np.testing.assert_allclose(found.failure, [5, 1, 1])
