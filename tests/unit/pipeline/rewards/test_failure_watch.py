"""A reward that fails too often ends the run, and says what the first failure was."""

from __future__ import annotations

import pytest

from pipeline.errors import RewardError
from pipeline.rewards.failure_watch import FailureWatch


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


def test_more_than_the_share_ends_the_run_and_names_the_first() -> None:
    watch = FailureWatch("reward 'mine:reward'", 0.25)
    watched(watch, "xxx......." + "." * 22 + "xxxxx.......")  # 8 of 44: fewer than a quarter
    with pytest.raises(
        RewardError,
        match=r"'mine:reward' failed on 13 of 49 samples, at most a share of 0.25 may; the first, raised: KeyError: "
        r"'score'; correct the function, or raise reward.max_failed_share",
    ):
        watched(watch, "xxxxxx")


def test_a_few_samples_end_nothing_unless_asked_to() -> None:
    watched(FailureWatch("reward 'mine:reward'", 0.1), "x" * 31)
    with pytest.raises(RewardError, match="32 of 32"):
        watched(FailureWatch("reward 'mine:reward'", 0.1), "x" * 32)
    with pytest.raises(RewardError, match="1 of 1"):
        watched(FailureWatch("reward 'mine:reward'", 0.1, at_least=1), "x")


def test_a_share_is_not_recommended_where_the_function_fails_on_each() -> None:
    with pytest.raises(RewardError, match=r"'score'; correct the function$"):
        watched(FailureWatch("reward 'mine:reward'", 0.1, at_least=1), "x")
    late = FailureWatch("reward 'mine:reward'", 0.1, at_least=1)
    with pytest.raises(RewardError, match=r"or raise reward\.max_failed_share$"):
        late.failed("timeout", "killed after 10 s")


def test_only_the_last_samples_count() -> None:
    watch = FailureWatch("reward 'mine:reward'", 0.1)
    watched(watch, "." * 1000)
    with pytest.raises(RewardError, match="26 of 256"):
        watched(watch, "x" * 26)
