"""Which phase holds a run back, in words.

The learner's phases of a step follow one another and cover it, so the share of `wait` is the share of time in which
batches come too slowly, and the rest says what makes the learner slow. What the awaited batch was going through in the
meantime says why it came late.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipeline.analysis.flight.timeline import (
    COLLECTOR,
    COLLECTOR_PHASES,
    LEARNER_PHASES,
    RANK_ZERO,
    STEP,
    Span,
    last_steps,
)
from pipeline.analysis.run_log import RunLog

WINDOW_STEPS = 20
"""Verdicts look at this many of the last steps, or at some more, which are whole stages: long enough to hold a
checkpoint, short enough to follow a change."""

CLOSE = 0.1
"""A second group whose share is this near the first is named too: it would be the next bottleneck."""

_ADVICE = {
    "rollouts": "the learner waits {share} of each step; add engines or allow lag",
    "evaluations": "the learner waits {share} of each step for held-out answers; raise evaluation.every",
    "committing": "the learner waits {share} of each step until its batch is written; look at the run's disk",
    "learner": "scoring and updating take {share} of each step; add data-parallel ranks or larger micro-batches",
    "publishing": "moving weights takes {share} of each step; publish less often (schedule staged)",
    "records": "writing log-probabilities and statistics takes {share} of each step; look at the run's disk",
    "checkpoints": "saving takes {share} of the time; raise checkpoint.every",
}


def whole_stages(window: int, stage: int) -> int:
    """Steps of as many stages as hold `window` steps. The learner waits for a whole stage at its beginning, so that the
    steps within it say nothing about rollouts."""
    return -(-window // stage) * stage


def phase_shares(spans: Sequence[Span], *, window: int = WINDOW_STEPS, stage: int = 1) -> dict[str, float]:
    """Share (0 to 1) of each phase of learner rank 0 in the last `window` steps, up to whole stages of `stage` steps;
    empty when nothing was timed.

    The very first step is left out as soon as there is a stage without it: it is slow, because everything is set up in
    it.
    """
    seconds = dict.fromkeys(LEARNER_PHASES, 0.0)
    for span in _recent(spans, window, stage):
        seconds[span.name] += span.end - span.start
    total = sum(seconds.values())
    return {phase: spent / total for phase, spent in seconds.items()} if total > 0 else {}


def wait_shares(spans: Sequence[Span], *, window: int = WINDOW_STEPS, stage: int = 1) -> dict[str, float]:
    """Share (0 to 1) of the learner's waiting in which the batch that it waited for was in each of the collector's
    phases; what is missing to 1 is time in which it was not begun, or nothing is known of it."""
    batches = defaultdict[int, list[Span]](list)
    for span in spans:
        if span.part == COLLECTOR and span.name in COLLECTOR_PHASES and span.lane.startswith("batches"):
            batches[span.number].append(span)
    waits = [span for span in _recent(spans, window, stage) if span.name == "wait"]
    seconds = dict.fromkeys(COLLECTOR_PHASES, 0.0)
    for wait, batch in _batches_waited_for(waits):
        for phase in batches.get(batch, ()):
            seconds[phase.name] += wait.overlap_s(phase)
    total = sum(wait.end - wait.start for wait in waits)
    return {phase: min(1.0, spent / total) if total > 0 else 0.0 for phase, spent in seconds.items()}


def _batches_waited_for(waits: Iterable[Span]) -> Iterator[tuple[Span, int]]:
    """Each wait with its batch. A step waits for its own; the first of a stage that is scored at its beginning then
    for every batch of that stage in turn, its own once more (pipeline.trainer.old_logprobs)."""
    of_step = Counter[int]()
    for wait in sorted(waits, key=lambda span: span.start):
        yield wait, wait.number + max(0, of_step[wait.number] - 1)
        of_step[wait.number] += 1


def judged_steps(spans: Sequence[Span], *, window: int = WINDOW_STEPS, stage: int = 1) -> tuple[int, ...]:
    """First step and end of those that shares and verdict are of; empty without any."""
    numbers = {span.number for span in _recent(spans, window, stage)}
    return (min(numbers), max(numbers) + 1) if numbers else ()


def time_shares(spans: Sequence[Span], *, window: int = WINDOW_STEPS, stage: int = 1) -> dict[str, float]:
    """As `phase_shares`, with the waiting split by what the learner waited for."""
    shares, waits = (of(spans, window=window, stage=stage) for of in (phase_shares, wait_shares))
    if not shares:
        return {}
    waited = shares.pop("wait")
    return {
        "wait for rollouts": waited * max(0.0, 1.0 - waits["evaluate"] - waits["commit"]),
        "wait for evaluations": waited * waits["evaluate"],
        "wait for commits": waited * waits["commit"],
        **shares,
    }


def bottleneck(shares: Mapping[str, float]) -> str:
    """A verdict on `time_shares`: what takes most of a step, how much, and what to change."""
    if not shares:
        return "nothing to judge yet: no step has finished"
    groups = {
        "rollouts": shares["wait for rollouts"],
        "evaluations": shares["wait for evaluations"],
        "committing": shares["wait for commits"],
        "learner": shares["logprobs"] + shares["update"],
        "publishing": shares["publish"],
        "records": shares["record"],
        "checkpoints": shares["save"],
    }
    slowest, runner_up = sorted(groups, key=groups.__getitem__, reverse=True)[:2]
    close = groups[slowest] - groups[runner_up] < CLOSE
    verdict = f"{slowest}: {_ADVICE[slowest].format(share=_percent(groups[slowest]))}"
    return verdict + (f" (next: {runner_up}, {_percent(groups[runner_up])})" if close else "")


def newest_shares(run_log: RunLog) -> dict[str, float]:
    """The `time_shares` of a run's last steps, by its metrics and events."""
    stage = run_log.recipe.build_schedule().updates_per_stage
    return time_shares(last_steps(run_log, whole_stages(WINDOW_STEPS, stage) + 1), stage=stage)


def _recent(spans: Sequence[Span], window: int, stage: int) -> list[Span]:
    """Phases of rank 0 in the last steps."""
    phases = [s for s in spans if s.part == RANK_ZERO and s.lane == STEP and s.name in LEARNER_PHASES]
    steps = sorted({span.number for span in phases})
    settled = steps[1:] if len(steps) > stage else steps
    whole = max(stage, len(settled) // stage * stage)
    chosen = set(settled[-min(whole, whole_stages(window, stage)) :])
    return [span for span in phases if span.number in chosen]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
