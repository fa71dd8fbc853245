"""The statistics behind the verdicts, against scipy and by hand, and how often a page of equal arms is wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tests.evidence.hypotheses import Curve, faster, order
from tests.evidence.statistics import Spread, holm


def test_pooled_variance_by_hand() -> None:
    """Squares about the means: 2 × .1² + 2 × .2² = .1 over 2 degrees of freedom."""
    spread = Spread.of([np.array([0.4, 0.6]), np.array([0.1, 0.5])])
    assert (float(spread.sd), spread.df) == (pytest.approx(math.sqrt(0.1 / 2)), 2)


def test_a_difference_of_two_cells_is_the_pooled_t_test() -> None:
    ours, theirs = np.array([0.7, 0.9, 0.8, 0.85]), np.array([0.5, 0.75, 0.6])
    estimate = Spread.of([ours, theirs]).difference(ours, theirs)
    known = stats.ttest_ind(ours, theirs, alternative="greater")
    assert float(estimate.p_above(0.0)) == pytest.approx(known.pvalue)
    assert float(estimate.p_below(0.0)) == pytest.approx(1.0 - known.pvalue)
    interval = stats.ttest_ind(ours, theirs).confidence_interval()
    assert estimate.interval() == pytest.approx((interval.low, interval.high))


def test_without_a_spread_nothing_is_known() -> None:
    one = Spread.of([np.array([0.9])]).mean(np.array([0.9]))
    same = Spread.of([np.array([0.9, 0.9])]).mean(np.array([0.9, 0.9]))
    assert (float(one.p_above(0.0)), float(same.p_above(0.0))) == (1.0, 1.0)
    assert one.interval() == (-math.inf, math.inf)


def test_holm_by_hand() -> None:
    """Sorted .01, .02, .03, .4 times 4, 3, 2, 1 is .04, .06, .06, .4; order of the input is kept."""
    assert holm(np.array([0.03, 0.4, 0.01, 0.02])) == pytest.approx([0.06, 0.4, 0.04, 0.06])
    assert holm(np.array([[0.9, 0.8]])).tolist() == [[1.0, 1.0]]


def line(*values: float, seconds: float) -> Curve:
    """Four runs with the same curve; their seconds differ by up to 3 %."""
    times = np.arange(len(values)) * seconds * np.array([[1.0], [1.01], [1.02], [1.03]])
    shape = np.broadcast_to(np.array(values), times.shape)
    return Curve(versions=tuple(range(len(values))), values=shape, samples=times, seconds=times)


def test_cost_is_compared_by_the_unfavorable_end_of_the_bracket() -> None:
    late, early, never = ("plain", "late"), ("plain", "early"), ("plain", "never")
    slow, stuck = line(0.1, 0.2, 0.7, seconds=50.0), line(0.1, 0.2, 0.3, seconds=50.0)
    near, far = line(0.1, 0.7, 0.8, seconds=60.0), line(0.1, 0.7, 0.8, seconds=5.0)
    # 60 s against a bracket from 50 to 100 s: not known. 5 s against it: cheaper.
    assert faster({late: slow, early: near}, early, late, "seconds", 0.6).shown > 0.5
    found = faster({late: slow, early: far}, early, late, "seconds", 0.6)
    assert found.shown < 1e-6
    assert found.refuted == 1.0
    # What is never reached costs at least the whole run, 100 s.
    assert faster({never: stuck, early: far}, early, never, "seconds", 0.6).shown < 1e-6
    assert faster({never: stuck, early: far}, never, early, "seconds", 0.6).refuted < 1e-6


def test_a_run_that_diverged_makes_nobody_faster() -> None:
    """It reached nothing, so how long it would have taken is not known."""
    ours, theirs = ("plain", "ours"), ("plain", "theirs")
    near = line(0.1, 0.7, 0.8, seconds=60.0)
    seconds = np.array([[0.0, 10.0, 20.0]] * 3 + [[0.0, np.inf, np.inf]])
    values = np.array([[0.1, 0.7, 0.8]] * 3 + [[0.1, 0.0, 0.0]])
    broken = Curve(versions=(0, 1, 2), values=values, samples=seconds, seconds=seconds)
    found = faster({ours: near, theirs: broken}, ours, theirs, "seconds", 0.6)
    assert found.shown > 0.5
    assert found.refuted == 1.0
    assert [ends.tolist() for ends in broken.bracket("seconds", 0.6)] == [[0.0] * 4, [10.0, 10.0, 10.0, np.inf]]


def four_runs(*values: float) -> Curve:
    """An evaluation every ten versions."""
    noise = np.array([[0.0], [0.01], [-0.01], [0.005]])
    times = np.broadcast_to(np.arange(float(len(values))), (4, len(values)))
    return Curve(
        versions=tuple(range(0, 10 * len(values), 10)), values=np.array(values) + noise, samples=times, seconds=times
    )


@pytest.mark.parametrize(
    ("early", "end", "shown", "refuted"),
    [(0.3, 0.2, True, False), (-0.3, -0.2, True, False), (0.3, -0.2, False, True), (0.3, 0.0, False, False)],
)
def test_an_order_is_foretold_when_both_differences_lie_on_one_side(
    early: float, end: float, shown: bool, refuted: bool
) -> None:
    """Four evaluations: a third of the run is the second one."""
    ours, theirs = ("plain", "ours"), ("plain", "theirs")
    curves = {ours: four_runs(0.1, 0.4 + early, 0.5, 0.6 + end), theirs: four_runs(0.1, 0.4, 0.5, 0.6)}
    found = order(curves, ours, theirs, 0.3334)
    assert (bool(found.shown < 0.05), bool(found.refuted < 0.05)) == (shown, refuted)
    assert float(found.estimate.value) == pytest.approx(end)
