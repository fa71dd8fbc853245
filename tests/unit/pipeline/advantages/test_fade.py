"""FADE's schedule, worked out by hand, and the estimators as the learner loop holds them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.advantages.methods.fade import FADE, FADEEstimator
from pipeline.advantages.methods.power import Power
from pipeline.advantages.methods.rloo import RLOO
from pipeline.data.batch import Batch
from pipeline.errors import CorruptCheckpointError, NonFiniteError

MakeBatch = Callable[..., Batch]


def fade(**options: object) -> FADEEstimator:
    return FADE.model_validate(options).estimator()


def test_a_run_begins_at_alpha_three_halves_and_delta_one() -> None:
    """3 (1 - .5) / (2 · .5) = 1.5; no entropy is known yet."""
    assert (fade().alpha, fade().delta) == (1.5, 1.0)
    assert (fade(alpha_max=1.25).alpha, fade(target_entropy=9.0).delta) == (1.25, 1.0)


@pytest.mark.parametrize(
    ("solve_rate", "alpha"),
    [(0.0, 3.0), (0.2, 3.0), (1 / 3, 3.0), (0.4, 2.25), (0.5, 1.5), (0.6, 1.0), (0.9, 1.0), (1.0, 1.0)],
)
def test_alpha_follows_the_solve_rate(solve_rate: float, alpha: float) -> None:
    """At .4: 3 · .6 / .8 = 2.25; 3 up to a third, 1 from .6 on."""
    run = fade(smoothing=1.0)
    run.observe(solve_rate=solve_rate, entropy=1.0)
    assert run.alpha == pytest.approx(alpha)


def test_delta_follows_the_entropy_below_its_target() -> None:
    """First entropy 1.6, so H* = .8: delta = clip(1 + Ĥ - .8, .3, 1)."""
    run = fade(smoothing=1.0)
    for entropy, delta in ((1.6, 1.0), (0.8, 1.0), (0.5, 0.7), (0.2, 0.4), (0.0, 0.3), (0.75, 0.95)):
        run.observe(solve_rate=0.5, entropy=entropy)
        assert run.delta == pytest.approx(delta)
    assert run.measured()["advantage_target_entropy"] == 0.8


def test_a_target_of_the_recipe_replaces_the_first_entropy() -> None:
    run = fade(smoothing=1.0, target_entropy=1.3, delta_min=0.5)
    run.observe(solve_rate=0.5, entropy=0.9)
    assert run.delta == pytest.approx(0.6)
    run.observe(solve_rate=0.5, entropy=0.1)
    assert run.delta == 0.5


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


def test_the_default_remembers_fifty_steps() -> None:
    """.98^50 = .364: after 50 steps at 0 a solve rate of .5 has fallen to .182."""
    run = fade()
    for _ in range(50):
        run.observe(solve_rate=0.0, entropy=1.0)
    assert run.measured()["advantage_solve_rate"] == pytest.approx(0.5 * 0.98**50)


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
    assert 1.0 <= resumed.alpha <= 3.0
    assert 0.3 <= resumed.delta <= 1.0


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


def test_a_run_s_first_advantages_are_those_of_its_settings(make_batch: MakeBatch) -> None:
    batch = make_batch()
    found = FADE().advantages(batch.reward, batch.group)
    np.testing.assert_array_equal(found, fade().advantages(batch.reward, batch.group))
    np.testing.assert_array_equal(found, Power(alpha=1.5, delta=1.0).advantages(batch.reward, batch.group))
    assert found.any()


def test_a_fixed_formula_has_no_state(make_batch: MakeBatch) -> None:
    estimator = RLOO().estimator()
    batch = make_batch()
    before = estimator.advantages(batch.reward, batch.group)
    estimator.observe(solve_rate=0.1, entropy=3.0)
    estimator.restore({})
    assert (estimator.state(), estimator.measured()) == ({}, {})
    np.testing.assert_array_equal(estimator.advantages(batch.reward, batch.group), before)
