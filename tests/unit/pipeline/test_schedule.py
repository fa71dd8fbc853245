"""required_version against hand-written tables, and the promises that hold for every schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.schedule import Schedule

TABLES = [
    (Schedule(kind="sync", steps=4), [0, 1, 2, 3], [0, 1, 2, 3]),
    (Schedule(kind="async", steps=5, lag=2), [0, 0, 0, 1, 2], [0, 1, 2, 3, 4]),
    (
        Schedule(kind="async", steps=7, lag=3, decided_lags=((3, 1), (5, 2))),
        [0, 0, 0, 2, 3, 3, 4],
        [0, 1, 2, 3, 4, 5, 6],
    ),
    (
        Schedule(kind="async", steps=12, lag=3, decided_lags=((4, 0), (7, 3))),
        [0, 0, 0, 0, 4, 5, 6, 6, 6, 6, 7, 8],
        list(range(12)),
    ),
    (Schedule(kind="staged", steps=7, updates_per_stage=3), [0, 0, 0, 3, 3, 3, 6], [2, 5, 6]),
]


@pytest.mark.parametrize(("schedule", "required", "publishing"), TABLES)
def test_tables(schedule: Schedule, required: list[int], publishing: list[int]) -> None:
    assert [schedule.required_version(b) for b in range(schedule.steps)] == required
    assert [s for s in range(schedule.steps) if schedule.publishes_after(s)] == publishing


schedules = st.builds(
    Schedule,
    kind=st.sampled_from(["sync", "async", "staged"]),
    steps=st.integers(1, 60),
    lag=st.integers(1, 9),
    updates_per_stage=st.integers(1, 12),
)


decided = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), max_size=4, unique_by=lambda one: one[0])


@given(schedules, decided)
def test_what_is_required_never_falls(schedule: Schedule, lags: list[tuple[int, int]]) -> None:
    """Nor does a later decision change what a batch before it required."""
    lags = sorted((first, min(lag, schedule.lag)) for first, lag in lags)
    required = [replace(schedule, decided_lags=tuple(lags)).required_version(b) for b in range(schedule.steps)]
    assert required == sorted(required)
    for index, (first, _) in enumerate(lags):
        before = replace(schedule, decided_lags=tuple(lags[:index]))
        assert required[:first] == [before.required_version(b) for b in range(min(first, schedule.steps))]


@given(schedules)
def test_what_is_published_before_a_batch_is_what_the_steps_before_it_publish(schedule: Schedule) -> None:
    for batch in range(schedule.steps + 1):
        versions = [step + 1 for step in range(batch) if schedule.publishes_after(step)]
        assert schedule.published_before(batch) == max(versions, default=0)


@given(schedules)
def test_every_required_version_is_published_before_it_is_waited_for(schedule: Schedule) -> None:
    """No deadlock: batch b waits for a version that training the batches before b has published."""
    for batch in range(schedule.steps):
        version = schedule.required_version(batch)
        assert 0 <= version <= batch
        assert version == 0 or schedule.publishes_after(version - 1)


@given(schedules)
def test_batches_in_flight_bounds_what_one_version_allows(schedule: Schedule) -> None:
    for version in range(schedule.steps):
        startable = [b for b in range(version, schedule.steps) if schedule.required_version(b) <= version]
        assert len(startable) <= schedule.batches_in_flight


@given(schedules)
def test_the_last_version_is_always_published(schedule: Schedule) -> None:
    assert schedule.publishes_after(schedule.steps - 1)


def test_allows() -> None:
    schedule = Schedule(kind="async", steps=9, lag=2)
    assert [v for v in range(9) if schedule.allows(5, v)] == [3, 4, 5]
