"""The simulated loops: exact where a schedule can be worked out by hand, and the promises of every schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.plan.costs import Durations, Simulated, simulate, steady_seconds_per_step
from pipeline.schedule import Schedule

schedules = st.builds(
    Schedule,
    kind=st.sampled_from(["sync", "async", "staged"]),
    steps=st.integers(1, 40),
    lag=st.integers(1, 6),
    updates_per_stage=st.integers(1, 8),
)
seconds = st.integers(0, 50).map(float)
phases = st.builds(
    lambda rollout, score, update, take, rest: Durations(
        rollout_s=rollout, score_s=score, update_s=update, publish_s=take + rest, take_s=take
    ),
    *(seconds for _ in range(5)),
)


def durations(
    rollout: float = 10.0, score: float = 1.0, update: float = 5.0, publish: float = 2.0, take: float = 0.0
) -> Durations:
    return Durations(rollout_s=rollout, score_s=score, update_s=update, publish_s=publish, take_s=take)


def lags(played: Simulated) -> list[int]:
    return [batch - version for batch, version in enumerate(played.started_versions)]


def in_turns(times: Durations) -> float:
    return times.rollout_s + times.score_s + times.update_s + times.publish_s


@given(phases, st.integers(1, 30))
def test_sync_is_the_sum_of_its_phases(times: Durations, steps: int) -> None:
    played = simulate(Schedule(kind="sync", steps=steps), times)
    assert played.finished_s[-1] == steps * in_turns(times)
    assert played.engines_busy_s == steps * times.rollout_s
    assert played.learner_waited_s == steps * times.rollout_s
    assert set(lags(played)) == {0}


@given(phases, st.integers(1, 6))
def test_async_runs_at_the_pace_of_the_slower_side(times: Durations, lag: int) -> None:
    """The learner waits for its weights to be taken, the engines while they are given them; neither for both."""
    learner, given = times.score_s + times.update_s, times.publish_s - times.take_s
    found = steady_seconds_per_step(Schedule(kind="async", lag=lag, steps=1), times)
    slower = max(learner + times.take_s, times.rollout_s + given)
    assert slower - 1e-6 <= found <= max(times.rollout_s, learner) + times.publish_s + 1e-6


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (durations(rollout=10, update=3, publish=2, take=0.5), 11.5),
        (durations(rollout=3, update=9, publish=2, take=0.5), 10.5),
        (durations(rollout=10, update=9, publish=2, take=0.5), 11.75),
        (durations(rollout=1, update=1, publish=6, take=2), 6.0),
    ],
    ids=["engines are busier", "the learner is busier", "both are busy", "weights move all the time"],
)
def test_weights_move_beside_training(times: Durations, expected: float) -> None:
    """Learner: 1 s of scoring, its update, 0.5 s for the weights to be taken. Engines: a batch, and 1.5 s to get them.
    Where both are busy, a learner that waits for a batch finds its publish ended."""
    found = steady_seconds_per_step(Schedule(kind="async", lag=1, steps=1), times)
    assert found == pytest.approx(expected)


@given(phases, st.integers(2, 8))
def test_staged_amortises_the_publish(times: Durations, mu: int) -> None:
    """Generation goes on during updates within a stage; one publish a stage, and the pipe is filled once a stage."""
    learner = times.score_s + times.update_s
    found = steady_seconds_per_step(Schedule(kind="staged", updates_per_stage=mu, steps=mu), times)
    busier = max(mu * times.rollout_s + learner, times.rollout_s + mu * learner)
    assert mu * found == pytest.approx(busier + times.publish_s)


@given(schedules, phases)
def test_no_batch_is_staler_than_the_schedule_allows(schedule: Schedule, times: Durations) -> None:
    played = simulate(schedule, times)
    assert len(played.finished_s) == len(played.started_versions) == schedule.steps
    assert all(schedule.allows(batch, version) for batch, version in enumerate(played.started_versions))
    assert played.finished_s == sorted(played.finished_s)


@given(schedules, phases)
def test_work_is_neither_lost_nor_invented(schedule: Schedule, times: Durations) -> None:
    played = simulate(schedule, times)
    assert played.engines_busy_s == pytest.approx(schedule.steps * times.rollout_s)
    assert played.num_publishes == sum(schedule.publishes_after(step) for step in range(schedule.steps))
    learner = schedule.steps * (times.score_s + times.update_s)
    serial = schedule.steps * in_turns(times)
    assert max(schedule.steps * times.rollout_s, learner) <= played.finished_s[-1] <= serial or serial == pytest.approx(
        played.finished_s[-1]
    )


def test_a_publish_pauses_generation_and_nothing_is_generated_twice() -> None:
    """Rollouts of 10 s, learner 6 s, publish 2 s: batch 1 is interrupted at 16 s for 2 s and is done at 22 s. The
    learner does not wait for the second publish, which ends at 30 s."""
    played = simulate(Schedule(kind="async", lag=1, steps=3), durations())
    assert played.finished_s[:2] == [16.0, 28.0]


def test_lag_is_reached_when_engines_run_ahead() -> None:
    played = simulate(Schedule(kind="async", lag=3, steps=12), durations(rollout=1.0))
    assert max(lags(played)) == 3
