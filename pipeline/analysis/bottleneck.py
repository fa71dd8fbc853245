"""Which phase holds a run back, in words.

The learner's phases of a step follow one another and cover it, so the share of `wait` is the share of time in which
rollouts are too slow, and the rest says what makes the learner slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LEARNER_PHASES = ("wait", "logprobs", "update", "publish", "save")
"""In the order in which they happen within a step."""

WINDOW_STEPS = 20
"""Verdicts look at this many of the last steps: long enough to hold a checkpoint, short enough to follow a change."""

CLOSE = 0.1
"""A second group whose share is this near the first is named too: it would be the next bottleneck."""


def phase_shares(metrics: Sequence[Mapping[str, Any]], *, window: int = WINDOW_STEPS) -> dict[str, float]:
    """Share (0 to 1) of each learner phase in the last `window` steps; empty when nothing was timed.

    The very first step is left out as soon as there is another: it is slow, because everything is set up in it.
    """
    timed = [line["seconds"] for line in metrics if line.get("seconds")]
    recent = timed[1:][-window:] or timed
    seconds = {phase: sum(float(step.get(phase, 0.0)) for step in recent) for phase in LEARNER_PHASES}
    total = sum(seconds.values())
    return {phase: spent / total for phase, spent in seconds.items()} if total > 0 else {}


def bottleneck(metrics: Sequence[Mapping[str, Any]], *, window: int = WINDOW_STEPS) -> str:
    """A verdict over the last `window` steps: what takes most of a step, how much, and what to change."""
    shares = phase_shares(metrics, window=window)
    if not shares:
        return "nothing to judge yet: no step has finished"
    groups = {
        "rollouts": shares["wait"],
        "learner": shares["logprobs"] + shares["update"],
        "publishing": shares["publish"],
        "checkpoints": shares["save"],
    }
    slowest, runner_up = sorted(groups, key=groups.__getitem__, reverse=True)[:2]
    percent = _percent(groups[slowest])
    advice = {
        "rollouts": f"the learner waits {percent} of each step; add engines or allow lag",
        "learner": f"scoring and updating take {percent} of each step; add data-parallel ranks or larger micro-batches",
        "publishing": f"moving weights takes {percent} of each step; publish less often (schedule staged)",
        "checkpoints": f"saving takes {percent} of the time; raise checkpoint.every",
    }
    close = groups[slowest] - groups[runner_up] < CLOSE
    return f"{slowest}: {advice[slowest]}" + (f" (next: {runner_up}, {_percent(groups[runner_up])})" if close else "")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
