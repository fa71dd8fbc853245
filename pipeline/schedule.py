"""Staleness is one function: `required_version(batch)`.

Version v of the policy is the one that has been trained on v batches. `required_version(b)` is the version that
must be published before batch b may start; who waits, what is stale and when weights move all follow from it.

    schedule            required_version(b)     publishes after step s
    sync                b                       always
    async, lag k        max(0, b - k)           always
    staged, mu updates  floor(b / mu) * mu      when (s + 1) is a multiple of mu
    async, decided      max over batches ≤ b    always

A lag that the ESS controller raises lets no batch do with an older version than the batch before it: what is required
never falls, so that what was counted once stays counted (pipeline.rollout.batch_builder).

The last step of a run always publishes, so that the final policy can be evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When batches may start and when weights are published.

    `lag` counts versions and is read by `async` only; `updates_per_stage` (mu of Mu-GRPO) by `staged` only.
    """

    kind: Literal["sync", "async", "staged"]
    steps: int
    lag: int = 0
    updates_per_stage: int = 1
    decided_lags: tuple[tuple[int, int], ...] = ()
    """(first batch, lag), ascending by batch: what the ESS controller decided, at most `lag`. Read by `async` only."""
    overlaps: bool = field(init=False)
    """Whether a batch may be trained on before the newest version is published: weights move beside training."""
    batches_in_flight: int = field(init=False)
    """How many batches may be under way at once: those that one published version allows."""

    def __post_init__(self) -> None:
        overlaps = self.kind == "staged" or (self.kind == "async" and self.lag > 0)
        in_flight = {"sync": 1, "async": self.lag + 1, "staged": self.updates_per_stage}[self.kind]
        object.__setattr__(self, "overlaps", overlaps)
        object.__setattr__(self, "batches_in_flight", in_flight)

    def required_version(self, batch: int) -> int:
        """The policy version that must be published before `batch` may start."""
        if self.kind == "async":
            lags = [(0, self.lag), *((first, lag) for first, lag in self.decided_lags if first <= batch)]
            lasts = [*(first - 1 for first, _ in lags[1:]), batch]
            return max(0, *(last - lag for last, (_, lag) in zip(lasts, lags, strict=True)))
        if self.kind == "staged":
            return batch // self.updates_per_stage * self.updates_per_stage
        return batch

    def published_before(self, batch: int) -> int:
        """The version that is published once all batches before `batch` (`steps`: all) are trained. Until `batch` is
        committed there can be no later one."""
        return batch if self.kind == "async" or batch == self.steps else self.required_version(batch)

    def publishes_after(self, step: int) -> bool:
        """Whether version `step + 1` goes to the engines once `step` is trained."""
        stage_ends = self.kind != "staged" or (step + 1) % self.updates_per_stage == 0
        return stage_ends or step + 1 == self.steps

    def __str__(self) -> str:
        """Its kind and its one number."""
        return {
            "sync": "sync",
            "async": f"async, lag {self.lag}",
            "staged": f"staged, µ = {self.updates_per_stage}",
        }[self.kind]

    def allows(self, batch: int, version: int) -> bool:
        """Whether a token of `version` may be part of `batch` (newer than the batch itself cannot exist)."""
        return self.required_version(batch) <= version <= batch
