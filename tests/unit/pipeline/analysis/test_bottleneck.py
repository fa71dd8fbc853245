from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.analysis.bottleneck import LEARNER_PHASES, bottleneck, phase_shares


def steps(count: int = 3, **seconds: float) -> list[dict[str, object]]:
    return [{"step": step, "seconds": seconds} for step in range(count)]


def test_waiting_learner_blames_rollouts_with_its_share() -> None:
    verdict = bottleneck(steps(wait=6.1, logprobs=1.0, update=2.0, publish=0.9))
    assert verdict == "rollouts: the learner waits 61 % of each step; add engines or allow lag"


@pytest.mark.parametrize(
    ("seconds", "beginning"),
    [
        (dict(wait=1.0, logprobs=3.0, update=5.0, publish=1.0), "learner: scoring and updating take 80 %"),
        (dict(wait=1.0, update=2.0, publish=7.0), "publishing: moving weights takes 70 %"),
        (dict(wait=1.0, update=1.0, save=8.0), "checkpoints: saving takes 80 %"),
    ],
)
def test_names_the_slowest_group(seconds: dict[str, float], beginning: str) -> None:
    assert bottleneck(steps(**seconds)).startswith(beginning)


def test_names_a_runner_up_that_is_close() -> None:
    assert bottleneck(steps(wait=4.8, update=5.2)).endswith("(next: rollouts, 48 %)")
    assert "next" not in bottleneck(steps(wait=4.0, update=6.0))


def test_warm_up_step_and_old_steps_do_not_count() -> None:
    warm_up = [{"step": 0, "seconds": {"wait": 1000.0}}]
    assert phase_shares([*warm_up, *steps(5, update=1.0)])["wait"] == 0.0
    assert phase_shares([*steps(50, wait=1.0), *steps(4, update=1.0)], window=4)["update"] == 1.0


def test_the_only_step_counts_and_no_step_is_no_verdict() -> None:
    assert phase_shares(steps(1, wait=3.0, update=1.0))["wait"] == 0.75
    assert bottleneck([]) == "nothing to judge yet: no step has finished"
    assert bottleneck([{"step": 0}]) == "nothing to judge yet: no step has finished"


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(LEARNER_PHASES, st.floats(0.001, 1e3))), min_size=1, max_size=30))
def test_shares_add_up_to_one(seconds: list[dict[str, float]]) -> None:
    shares = phase_shares([{"step": step, "seconds": each} for step, each in enumerate(seconds)])
    assert sum(shares.values()) == pytest.approx(1.0)
