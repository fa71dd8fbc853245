"""What each step of a run cost, one row a step: the source of scaling curves and of comparisons.

metrics       its tokens, its seconds, and when it ended
committed     the samples of its batch; where a killed collector left no such event, the batch's file
skipped/      its batch was lost by damage: it cost nothing, and the next version has the weights of this one
recipes       on how many accelerators: a later start may have another layout
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pipeline.analysis.run_log import RunLog, number
from pipeline.config.recipe import Recipe
from pipeline.data.run_directory import RunDirectory, numbered_files
from pipeline.data.store import BatchStore
from pipeline.errors import StoreError
from pipeline.gpu_needs import GpuNeeds

COMPUTE_AXES = ("samples", "tokens", "hours")
"""Compute of a run: samples trained on; response tokens trained on; accelerator-hours of its steps."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step, trained or skipped. What no file tells any more is None."""

    samples: int | None
    tokens: float | None
    """Of responses."""
    hours: float | None
    """Every accelerator of the run, of learner, engines and a teacher that it starts, over all phases of the step,
    waiting included; start-up and the pauses between two sessions are not. With weights.channel ipc learner and engines
    have the same ones. On a CPU machine a process is one."""
    ended: float | None
    """Seconds since 1970."""

    def spent(self, x: str) -> float | None:
        """On one of COMPUTE_AXES."""
        return dict(samples=self.samples, tokens=self.tokens, hours=self.hours)[x]


def steps_of(run_log: RunLog) -> list[Step]:
    """Every step so far, from step 0 on."""
    lines = {int(line["step"]): line for line in run_log.metrics}
    samples = samples_of_batches(run_log)
    skipped_at = {int(event["step"]): float(event["time"]) for event in run_log.of_kind("skipped")}
    skipped = set(run_log.skipped)
    return [
        Step(samples=0, tokens=0.0, hours=0.0, ended=skipped_at.get(step))
        if step in skipped
        else _trained(lines.get(step), samples.get(step), run_log.recipe_of(step))
        for step in range(run_log.num_steps)
    ]


def spent_by_version(steps: Sequence[Step], x: str) -> list[float]:
    """[versions] of one of COMPUTE_AXES, spent when version v had been trained: from version 0, which cost nothing, to
    the last one of which all is known."""
    spent = [0.0]
    for step in steps:
        if (cost := step.spent(x)) is None:
            break
        spent.append(spent[-1] + cost)
    return spent


def samples_of_batches(run_log: RunLog) -> dict[int, int]:
    """Batch → its samples, for every batch that was committed; one of which neither the event nor a file that can be
    read is left is missing."""
    found = {int(event["batch"]): int(event["samples"]) for event in run_log.of_kind("committed")}
    batches = RunDirectory(run_log.run_dir).batches
    if untold := numbered_files(batches, ".zarr.zip").keys() - found.keys():
        store = BatchStore(batches)
        for index in untold:
            with suppress(StoreError):
                found[index] = store.num_samples(index)
    return found


def _trained(line: Mapping[str, Any] | None, samples: int | None, recipe: Recipe) -> Step:
    if line is None:
        return Step(samples=samples, tokens=None, hours=None, ended=None)
    return Step(
        samples=samples,
        tokens=number(line, "num_tokens"),
        hours=_accelerators(recipe) * step_seconds(line) / 3600.0 if "seconds" in line else None,
        ended=float(line["time"]),
    )


def step_seconds(line: Mapping[str, Any]) -> float:
    """Of all phases of a step, by its line of metrics, waiting included."""
    return sum(float(spent) for spent in line["seconds"].values())


def _accelerators(recipe: Recipe) -> int:
    """Also those of engines that the run did not start (rollout.urls): they work for it."""
    return replace(GpuNeeds.of(recipe), engines=recipe.rollout.engines).total
