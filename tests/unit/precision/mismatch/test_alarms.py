"""Each rule at, below and above its bound; what it names must exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from precision.mismatch.alarms import RULES, Rule, alarms
from precision.mismatch.statistics import Mismatch
from tests.support.mismatch_reference import random_tokens

ROOT = Path(__file__).parents[4]
HEALTHY: dict[str, Any] = dict(
    ess=0.99,
    k1_kl=0.001,
    ratio_mean=1.001,
    truncated_share=0.02,
    lag_max=1.0,
    mismatch=dict(age={"0": dict(k3_kl=1e-4, probability_error=1.01)}),
)


def with_value(rule: Rule, value: float) -> dict[str, Any]:
    """HEALTHY but for one statistic."""
    if len(rule.path) == 1:
        return HEALTHY | {rule.path[0]: value}
    if len(rule.path) == 2:
        return HEALTHY | {rule.path[0]: {rule.path[1]: value}}
    fresh = HEALTHY["mismatch"]["age"]["0"] | {rule.path[-1]: value}
    return HEALTHY | dict(mismatch=dict(age={"0": fresh}))


def names(metrics: dict[str, Any], *, quantized: bool = False) -> list[str]:
    return [alarm.rule.name for alarm in alarms(metrics, quantized=quantized)]


def test_a_healthy_step_has_none() -> None:
    assert names(HEALTHY) == []


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_only_what_is_beyond_the_bound_is_an_alarm(rule: Rule, quantized: bool) -> None:
    bound, center = rule.bound_for(quantized=quantized), rule.distance_from or 0.0
    margin = 0.01 * (bound or 1.0)
    outwards = 1.0 if rule.wrong == "above" else -1.0
    inside = with_value(rule, center + bound - margin * outwards)
    beyond = with_value(rule, center + bound + margin * outwards)
    assert names(inside, quantized=quantized) == []
    assert names(beyond, quantized=quantized) == [rule.name]
    (alarm,) = alarms(beyond, quantized=quantized)
    assert alarm.value == pytest.approx(bound + margin * outwards)
    assert rule.what in alarm.text
    assert f"{bound:g}" in alarm.text
    if rule.distance_from is not None:
        assert names(with_value(rule, center - bound * 1.01), quantized=quantized) == [rule.name]


def test_what_fp8_does_is_no_alarm_where_it_is_on_one_side() -> None:
    """The largest of the demo's steps under block FP8; the others are far below."""
    step = HEALTHY | dict(mismatch=dict(age={"0": dict(k3_kl=1.7e-2, probability_error=1.092)}))
    assert names(step) == ["fresh_kl_high", "fresh_probability_error_high"]
    assert names(step, quantized=True) == []


def test_a_value_next_to_its_bound_is_told_from_it() -> None:
    step = HEALTHY | dict(mismatch=dict(age={"0": dict(probability_error=1.05304)}))
    (alarm,) = alarms(step, quantized=False)
    assert alarm.text.endswith("is 1.053, above 1.05")


def test_statistics_of_a_step_have_what_the_rules_read() -> None:
    measured = Mismatch.of_step(random_tokens(0, [400], spread=0.5))
    line = measured.statistics() | dict(mismatch=measured.by_split(), truncated_share=0.0, lag_max=0.0)
    line |= dict(episodes=dict(given_up=0.0))
    line |= dict.fromkeys(("repeated_samples", "trained_shorter", "trained_easier"), 0.0)
    assert [rule.name for rule in RULES if rule.value(line) is None] == []
    assert "fresh_probability_error_high" in names(line)
