from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.analysis.flight.bottleneck import (
    bottleneck,
    judged_steps,
    phase_shares,
    time_shares,
    wait_shares,
    whole_stages,
)
from pipeline.analysis.flight.timeline import (
    LEARNER_PHASES,
    RANK_ZERO,
    STEP,
    Span,
    collector_spans,
    learner_spans,
)


def steps(count: int = 3, **seconds: float) -> list[Span]:
    """Each ends ten seconds after the one before."""
    return learner_spans([{"step": step, "time": 100.0 + 10.0 * step, "seconds": seconds} for step in range(count)])


def test_waiting_learner_blames_rollouts_with_its_share() -> None:
    verdict = bottleneck(time_shares(steps(wait=6.1, logprobs=1.0, update=2.0, publish=0.9)))
    assert verdict == "rollouts: the learner waits 61 % of each step; add engines or allow lag"


@pytest.mark.parametrize(
    ("seconds", "beginning"),
    [
        (dict(wait=1.0, logprobs=3.0, update=5.0, publish=1.0), "learner: scoring and updating take 80 %"),
        (dict(wait=1.0, update=2.0, publish=7.0), "publishing: moving weights takes 70 %"),
        (dict(wait=1.0, update=1.0, record=8.0), "records: writing log-probabilities and statistics takes 80 %"),
        (dict(wait=1.0, update=1.0, save=8.0), "checkpoints: saving takes 80 %"),
    ],
)
def test_names_the_slowest_group(seconds: dict[str, float], beginning: str) -> None:
    assert bottleneck(time_shares(steps(**seconds))).startswith(beginning)


def test_names_a_runner_up_that_is_close() -> None:
    assert bottleneck(time_shares(steps(wait=4.8, update=5.2))).endswith("(next: rollouts, 48 %)")
    assert "next" not in bottleneck(time_shares(steps(wait=4.0, update=6.0)))


@pytest.mark.parametrize(
    ("slow", "beginning"),
    [
        ("generate", "rollouts: the learner waits 80 %"),
        ("hold", "rollouts: the learner waits 80 %"),
        ("evaluate", "evaluations: the learner waits 70 % of each step for held-out answers"),
        ("commit", "committing: the learner waits 70 % of each step until its batch is written"),
    ],
)
def test_what_the_awaited_batch_went_through_is_blamed(slow: str, beginning: str) -> None:
    """Each step of 10 s waits for 8: for 7 of them, its batch was in the slow phase."""
    learner = steps(wait=8.0, update=2.0)
    events = [
        {"kind": "committed", "batch": step, "started": 90.0 + 10.0 * step, "seconds": {slow: 7.0}} for step in range(3)
    ]
    spans = [*learner, *collector_spans(events)]
    assert wait_shares(spans)[slow] == pytest.approx(7 / 8)
    assert bottleneck(time_shares(spans)).startswith(beginning)


def test_a_batch_that_was_ready_before_it_was_awaited_is_not_blamed() -> None:
    early = [
        {"kind": "committed", "batch": step, "started": 60.0 + 10.0 * step, "seconds": {"evaluate": 9.0}}
        for step in range(3)
    ]
    assert wait_shares([*steps(wait=8.0), *collector_spans(early)])["evaluate"] == 0.0


def test_each_wait_of_the_first_step_of_a_stage_is_for_another_batch() -> None:
    """A stage is scored before its first update, which waits for one of its batches after the other."""
    learner = [
        Span(part=RANK_ZERO, lane=STEP, name=name, number=number, start=start, end=end)
        for name, number, start, end in (
            *(("wait", 4, 100.0, 102.0), ("wait", 4, 102.0, 102.0), ("logprobs", 4, 102.0, 103.0)),
            *(("wait", 4, 103.0, 110.0), ("update", 4, 110.0, 110.5)),
            *(("wait", 5, 110.5, 110.5), ("update", 5, 110.5, 111.0)),
        )
    ]
    events = [
        {"kind": "committed", "batch": 4, "started": 90.0, "seconds": {"generate": 12.0}},
        {"kind": "committed", "batch": 5, "started": 91.0, "seconds": {"generate": 12.0, "evaluate": 7.0}},
    ]
    spans = [*learner, *collector_spans(events)]
    shares = wait_shares(spans, stage=2)
    assert (shares["generate"], shares["evaluate"]) == (pytest.approx(2 / 9), pytest.approx(7 / 9))
    assert bottleneck(time_shares(spans, stage=2)).startswith(
        "evaluations: the learner waits 64 % of each step for held-out answers"
    )


def test_the_steps_of_a_verdict_are_named() -> None:
    """Without the first one, as soon as there is another stage."""
    assert judged_steps([]) == ()
    assert judged_steps(steps(1, update=1.0)) == (0, 1)
    assert judged_steps(steps(5, update=1.0)) == (1, 5)
    assert judged_steps(steps(50, update=1.0)) == (30, 50)
    assert judged_steps(steps(50, update=1.0), stage=32) == (18, 50)


def test_warm_up_step_and_old_steps_do_not_count() -> None:
    seconds = [dict(wait=1000.0)] + [dict(update=1.0)] * 5
    lines = [{"step": step, "time": 2000.0 + step, "seconds": each} for step, each in enumerate(seconds)]
    assert phase_shares(learner_spans(lines))["wait"] == 0.0
    seconds = [dict(wait=1.0)] * 50 + [dict(update=1.0)] * 4
    lines = [{"step": step, "time": 2000.0 + step, "seconds": each} for step, each in enumerate(seconds)]
    assert phase_shares(learner_spans(lines), window=4)["update"] == pytest.approx(1.0)


@pytest.mark.parametrize("count", [25, 32, 33, 50, 64, 90])
def test_a_verdict_looks_at_whole_stages(count: int) -> None:
    """Of a stage of 32 steps, the first waits for rollouts until all are there: 80 % of the time."""
    seconds = [dict(wait=0.0 if step % 32 else 128.0, update=1.0) for step in range(count)]
    lines = [{"step": step, "time": 9000.0 + 200.0 * step, "seconds": each} for step, each in enumerate(seconds)]
    spans = learner_spans(lines)
    expected = 128 / (128 + min(count, 32))
    assert phase_shares(spans, stage=32)["wait"] == pytest.approx(expected)
    assert bottleneck(time_shares(spans, stage=32)).startswith("rollouts: the learner waits 8")
    assert whole_stages(20, 32) == 32
    assert [whole_stages(20, stage) for stage in (1, 4, 8)] == [20, 20, 24]


def test_the_only_step_counts_and_no_step_is_no_verdict() -> None:
    assert phase_shares(steps(1, wait=3.0, update=1.0))["wait"] == pytest.approx(0.75)
    assert bottleneck(time_shares([])) == "nothing to judge yet: no step has finished"
    assert bottleneck(time_shares(steps(1))) == "nothing to judge yet: no step has finished"


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(LEARNER_PHASES, st.floats(0.001, 1e3))), min_size=1, max_size=30))
def test_shares_add_up_to_one(seconds: list[dict[str, float]]) -> None:
    lines = [{"step": step, "time": 1e5, "seconds": each} for step, each in enumerate(seconds)]
    assert sum(phase_shares(learner_spans(lines)).values()) == pytest.approx(1.0)
