"""What each step of a run cost, one row a step: the source of scaling curves and of comparisons.

metrics       its tokens, its seconds, and when it ended
committed     the samples of its batch
skipped/      its batch was lost by damage: it cost nothing, and the next version has the weights of this one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.analysis.run_log import RunLog, number


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step, trained or skipped. What no file tells any more is None."""

    samples: float | None
    tokens: float | None
    """Of responses."""
    seconds: float | None
    """Of all its phases, waiting included."""
    ended: float | None
    """Seconds since 1970."""


def steps_of(run_log: RunLog) -> list[Step]:
    """Every step so far, from step 0 on."""
    lines = {int(line["step"]): line for line in run_log.metrics}
    samples = {int(event["batch"]): float(event["samples"]) for event in run_log.of_kind("committed")}
    skipped_at = {int(event["step"]): float(event["time"]) for event in run_log.of_kind("skipped")}
    skipped = set(run_log.skipped)
    return [
        Step(samples=0.0, tokens=0.0, seconds=0.0, ended=skipped_at.get(step))
        if step in skipped
        else _trained(lines.get(step), samples.get(step))
        for step in range(run_log.num_steps)
    ]


def _trained(line: Mapping[str, Any] | None, samples: float | None) -> Step:
    if line is None:
        return Step(samples=samples, tokens=None, seconds=None, ended=None)
    return Step(
        samples=samples,
        tokens=number(line, "num_tokens"),
        seconds=sum(float(spent) for spent in line["seconds"].values()) if "seconds" in line else None,
        ended=float(line["time"]),
    )
