"""What a version of age goes with is found within arms, whatever the arms' own levels are."""

from __future__ import annotations

import math

import pytest

from tests.evidence.ages import AGE, slope_within, told
from tests.evidence.results import Arm
from tests.support.evidence import a_result


def arm(name: str, ages: list[float], correct: list[int]) -> Arm:
    """One run for each age, of seed 0 on, of which so many of 100 held-out answers were right at the end."""
    return Arm(
        results=[
            a_result(name, seed, [[right], [right]], samples=100, series={AGE: [0.5 * age, None, 1.5 * age]})
            for seed, (age, right) in enumerate(zip(ages, correct, strict=True))
        ]
    )


def test_levels_of_arms_and_seeds_are_not_taken_for_age() -> None:
    """The older arm is the better one and the later seeds are easier; a version costs .02."""
    young, old = arm("a", [3.0, 5.0, 4.0], [44, 50, 62]), arm("b", [6.0, 7.0, 8.0], [80, 88, 96])
    slope = slope_within([young, old])
    assert slope is not None
    assert math.isclose(slope.value, -0.02)
    assert slope.error < 1e-6
    assert slope.runs == 6


def test_the_interval_is_that_of_least_squares_with_levels() -> None:
    """Three arms of two seeds. By hand, as differences of the second seed and the first, about their mean: ages
    -2, 0, 2 and ends -.04, -.02, .06, so the slope is .025, and residuals .01, -.02, .01 are left to one degree of
    freedom."""
    ends = [[50, 46], [50, 48], [50, 56]]
    slope = slope_within([arm("a", [4.0, 2.0], ends[0]), arm("b", [4.0, 4.0], ends[1]), arm("c", [4.0, 6.0], ends[2])])
    assert slope is not None
    assert math.isclose(slope.value, 0.025)
    assert math.isclose(slope.error, 12.7062047 * math.sqrt(6 * 0.01**2 / 8), rel_tol=1e-6)


@pytest.mark.parametrize(
    "arms",
    [
        [],
        [arm("a", [3.0], [50]), arm("b", [4.0], [60])],
        [arm("a", [3.0, 3.0, 3.0], [50, 60, 70])],
        [arm("a", [3.0, 4.0], [50, 60])],
    ],
)
def test_what_says_nothing_gives_no_slope(arms: list[Arm]) -> None:
    assert slope_within(arms) is None


def test_nothing_is_told_where_nothing_is_stale() -> None:
    assert told([arm("a", [0.0], [50])]) == told([]) == ""
    said = told([arm("a", [3.0, 4.0], [50, 60]), arm("b", [5.0], [50])])
    assert "4.0 versions old in the mean, 3.5 to 5.0 in that of an arm" in said


def test_what_age_could_make_between_arms_is_told_where_it_is_seen_to_matter() -> None:
    """Arms of 4 and 7 versions in the mean, .02 a version; and an interval that holds 0."""
    young, old = arm("a", [3.0, 5.0, 4.0], [44, 50, 62]), arm("b", [6.0, 7.0, 8.0], [80, 88, 96])
    assert told([young, old]).endswith("Between the oldest and the youngest arm that would make 0.06.")
    scattered = [arm(name, [4.0, second], ends) for name, second, ends in (("a", 2.0, [50, 46]), ("b", 4.0, [50, 48]))]
    assert told([*scattered, arm("c", [4.0, 6.0], [50, 56])]).endswith("runs).")
