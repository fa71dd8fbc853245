"""A discrete-event simulation of the two loops, driven by the same Schedule that they ask.

    collector   keeps batches_in_flight batches under way; batch b waits for version required_version(b), then for the
                engines, which work on the oldest batch first; batches are committed in order
    learner     takes batch s, scores and updates, publishes when publishes_after(s). In sync it waits for the publish.
                Else it waits until the weights are taken from it, and then only for the publish before this one, or
                while the next batch is not there
    publish     while the engines are given weights they stand still, then go on with what was in flight

Assumed: a batch takes all engines together `rollout_s` of undisturbed work (no long tail that the next batch could
fill), every phase takes the same time in every step, commits and evaluation take none.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import simpy

from pipeline.schedule import Schedule

_PUBLISH_PRIORITY = -1
"""Before every batch: batch b asks for the engines with priority b."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of the phases of a step."""

    rollout_s: float
    """All samples of one batch, by all engines."""
    score_s: float
    """Log-probabilities before the update; 0 when the objective needs none."""
    update_s: float
    publish_s: float
    """Export, transfer and load; in sync, engines are paused and the learner waits."""
    take_s: float = 0.0
    """Of these, the first ones: the weights are taken from the learner, which waits under every schedule. Engines
    generate meanwhile, if they have a batch."""

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not 0.0 <= seconds < float("inf"):
                raise ValueError(f"{name} is {seconds}, expected seconds of 0 or more")
        if self.take_s > self.publish_s:
            raise ValueError(f"take_s is {self.take_s}, expected at most publish_s, {self.publish_s}")


@dataclass(kw_only=True)
class Simulated:
    """What happened; lists are by batch = step."""

    schedule: Schedule
    started_versions: list[int] = field(default_factory=list)
    """Version that the engines served when the batch was started."""
    trained_s: list[float] = field(default_factory=list)
    """When the step was trained, and nothing of it published."""
    finished_s: list[float] = field(default_factory=list)
    """When the learner was done with the step, and with what it waits for of the step's publish."""
    engines_busy_s: float = 0.0
    learner_waited_s: float = 0.0
    """For batches."""
    learner_publishing_s: float = 0.0
    """For weights to be taken, and for publishes to end."""
    num_publishes: int = 0

    @property
    def lags(self) -> list[int]:
        """For each batch, by how many versions its oldest tokens are behind the weights that they train."""
        return [batch - version for batch, version in enumerate(self.started_versions)]

    @property
    def total_s(self) -> float:
        return self.finished_s[-1]

    @property
    def seconds_per_step(self) -> float:
        """In the second half of the run, over whole stages."""
        stage = self.schedule.updates_per_stage if self.schedule.kind == "staged" else 1
        steps = self.schedule.steps
        first = steps // 2 // stage * stage
        last = steps // stage * stage
        if last <= first:
            first, last = 0, steps
        if first == 0:
            return self.finished_s[last - 1] / last
        # From step to like step: only the last publish of a run is waited for under every schedule.
        return (self.trained_s[last - 1] - self.trained_s[first - 1]) / (last - first)


def simulate(schedule: Schedule, durations: Durations) -> Simulated:
    """Play the whole run."""
    return _Loops(schedule, durations).play()


def steady_seconds_per_step(schedule: Schedule, durations: Durations, *, stages: int = 6) -> float:
    """Seconds a step when the run is long enough, whatever the schedule's own number of steps."""
    stage = max(8, 2 * schedule.batches_in_flight)
    if schedule.kind == "staged":
        stage = schedule.updates_per_stage
    return simulate(replace(schedule, steps=stages * stage), durations).seconds_per_step


class _Loops:
    def __init__(self, schedule: Schedule, durations: Durations) -> None:
        self._schedule, self._durations = schedule, durations
        self._world = simpy.Environment()
        self._engines = simpy.PreemptiveResource(self._world)
        self._under_way = simpy.Container(self._world, schedule.batches_in_flight, schedule.batches_in_flight)
        self._committed = [self._world.event() for _ in range(schedule.steps)]
        self._published = 0
        self._delivered = self._world.event().succeed()
        """That the publish under way has ended."""
        self._next_version = self._world.event()
        self._result = Simulated(schedule=schedule)

    def play(self) -> Simulated:
        self._world.process(self._collect())
        self._world.run(self._world.process(self._learn()))
        return self._result

    def _collect(self) -> Generator[Any, Any, None]:
        for batch in range(self._schedule.steps):
            yield self._under_way.get(1)
            self._world.process(self._produce(batch))

    def _produce(self, batch: int) -> Generator[Any, Any, None]:
        while self._published < self._schedule.required_version(batch):
            yield self._next_version
        self._result.started_versions.append(self._published)
        yield from self._generate(batch)
        if batch > 0:
            yield self._committed[batch - 1]
        self._committed[batch].succeed()
        yield self._under_way.put(1)

    def _generate(self, batch: int) -> Generator[Any, Any, None]:
        """Hold the engines for rollout_s in all. A publish interrupts it, and it goes on afterwards."""
        left = self._durations.rollout_s
        while True:
            with self._engines.request(priority=batch) as turn:
                begin: float | None = None
                try:
                    yield turn
                    begin = self._world.now
                    yield self._world.timeout(left)
                    self._result.engines_busy_s += left
                    return
                except simpy.Interrupt:
                    # A turn can be taken away in the very moment in which it is given: then nothing was done.
                    done = 0.0 if begin is None else self._world.now - begin
                    self._result.engines_busy_s += done
                    left -= done
                    if left <= 0.0:  # interrupted at the very end
                        return

    def _learn(self) -> Generator[Any, Any, None]:
        for step in range(self._schedule.steps):
            if not self._committed[step].triggered:
                yield from self._publishing(self._delivered)
            asked = self._world.now
            yield self._committed[step]
            self._result.learner_waited_s += self._world.now - asked
            yield self._world.timeout(self._durations.score_s + self._durations.update_s)
            self._result.trained_s.append(self._world.now)
            if self._schedule.publishes_after(step):
                yield from self._publishing(self._delivered)
                yield from self._publishing(self._world.process(self._begin(step + 1)))
            self._result.finished_s.append(self._world.now)

    def _publishing(self, event: simpy.Event) -> Generator[Any, Any, None]:
        asked = self._world.now
        yield event
        self._result.learner_publishing_s += self._world.now - asked

    def _begin(self, version: int) -> Generator[Any, Any, None]:
        """Until the learner goes on."""
        if self._schedule.overlaps and version < self._schedule.steps:
            yield self._world.timeout(self._durations.take_s)
            self._delivered = self._world.process(self._deliver(version, self._durations.take_s))
        else:
            yield self._world.process(self._deliver(version, 0.0))

    def _deliver(self, version: int, taken_s: float) -> Generator[Any, Any, None]:
        with self._engines.request(priority=_PUBLISH_PRIORITY) as turn:
            yield turn
            yield self._world.timeout(self._durations.publish_s - taken_s)
        self._result.num_publishes += 1
        self._published = version
        self._next_version.succeed()
        self._next_version = self._world.event()
