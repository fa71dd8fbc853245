"""A reward that fails too often ends the run, and says what the first failure was."""

from __future__ import annotations

import random

import pytest

from pipeline.errors import RewardError
from pipeline.rewards.pool import FailureWatch


def watched(watch: FailureWatch, verdicts: str) -> None:
    for verdict in verdicts:
        if verdict == "x":
            watch.failed("raised", "KeyError: 'score'")
        else:
            watch.judged()


def test_the_first_failure_of_each_reason_is_told_once() -> None:
    told: list[tuple[str, str]] = []
    watch = FailureWatch("reward 'mine:reward'", 1.0, tell=lambda *what: told.append(what))
    for reason, detail in (("raised", "first"), ("raised", "second"), ("timeout", "third")):
        watch.failed(reason, detail)
    assert told == [("raised", "first"), ("timeout", "third")]


def test_more_than_the_share_leaves_by_chance_ends_the_run_and_names_the_first() -> None:
    watch = FailureWatch("reward 'mine:reward'", 0.25)
    watched(watch, "xxx......." * 10)  # 30 of 100 where 25 may
    with pytest.raises(
        RewardError,
        match=r"'mine:reward' failed on 57 of 127 samples, at most a share of 0.25 may; the first, raised: KeyError: "
        r"'score'; correct the function, or raise reward.max_failed_share",
    ):
        watched(watch, "x" * 30)


def test_a_few_samples_end_nothing_unless_asked_to() -> None:
    watched(FailureWatch("reward 'mine:reward'", 0.1), "x" * 31)
    with pytest.raises(RewardError, match="32 of 32"):
        watched(FailureWatch("reward 'mine:reward'", 0.1), "x" * 32)
    watched(FailureWatch("reward 'mine:reward'", 0.1, at_least=1), "x" * 6)
    with pytest.raises(RewardError, match="7 of 7"):
        watched(FailureWatch("reward 'mine:reward'", 0.1, at_least=1), "x" * 7)
    with pytest.raises(RewardError, match="1 of 1"):
        watched(FailureWatch("reward 'mine:reward'", 0.0, at_least=1), "x")
    watched(FailureWatch("reward 'mine:reward'", 1.0, at_least=1), "x" * 300)


def ended(fails: float, *, samples: int, at_least: int, times: int) -> int:
    """How many of so many watches end while a judge fails as often as that where 10 % may."""
    rng, found = random.Random(0), 0
    for _ in range(times):
        watch = FailureWatch("reward 'mine:judge'", 0.1, at_least=at_least)
        try:
            watched(watch, "".join("x" if rng.random() < fails else "." for _ in range(samples)))
        except RewardError:
            found += 1
    return found


def test_a_judge_that_fails_at_half_the_share_ends_nothing() -> None:
    """By the share alone 19 of 100 trials of four were refused, and 18 of 100 runs ended within 256 samples."""
    assert ended(0.05, samples=32, at_least=1, times=1000) == 0
    assert ended(0.05, samples=20_000, at_least=32, times=5) == 0
    assert ended(0.5, samples=100, at_least=1, times=100) == 100
    assert ended(0.3, samples=1000, at_least=32, times=20) == 20


def test_only_the_last_samples_count() -> None:
    watch = FailureWatch("reward 'mine:reward'", 0.1)
    watched(watch, "." * 1000)
    with pytest.raises(RewardError, match="52 of 256"):
        watched(watch, "x" * 52)
