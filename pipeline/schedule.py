"""Define staleness by one function, `required_version(batch)`.

Version v of the policy was trained on v batches. `required_version(b)` is the version that must be published before
batch b may start. Waits, staleness and publishes all follow from it.

    schedule            required_version(b)     publishes after step s
    sync                b                       always
    async, lag k        max(0, b - k)           always
    staged, mu updates  floor(b / mu) * mu      when (s + 1) is a multiple of mu
    async, decided      max over batches ≤ b    always

The required version never falls, even when the ESS controller raises the lag, so that samples counted once stay counted
(pipeline.rollout.batch_builder). The last step of a run always publishes, so that the final policy can be evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The rule for when batches start and weights are published. `lag` counts versions and is read by `async` only;
    `updates_per_stage` (mu of Mu-GRPO) by `staged` only."""

    kind: Literal["sync", "async", "staged"]
    steps: int
    lag: int = 0
    updates_per_stage: int = 1
    decided_lags: tuple[tuple[int, int], ...] = ()
    """(first batch, lag), ascending by batch: the ESS controller's decisions, at most `lag`. Read by `async` only."""
    overlaps: bool = field(init=False)
    """Whether a batch may be trained on before the newest version is published: weights move beside training."""
    batches_in_flight: int = field(init=False)
    """The most batches in progress at once: those that one published version allows."""

    def __post_init__(self) -> None:
        overlaps = self.kind == "staged" or (self.kind == "async" and self.lag > 0)
        in_flight = {"sync": 1, "async": self.lag + 1, "staged": self.updates_per_stage}[self.kind]
        object.__setattr__(self, "overlaps", overlaps)
        object.__setattr__(self, "batches_in_flight", in_flight)

    def required_version(self, batch: int) -> int:
        """Return the policy version that must be published before `batch` may start."""
        if self.kind == "async":
            lags = [(0, self.lag), *((first, lag) for first, lag in self.decided_lags if first <= batch)]
            lasts = [*(first - 1 for first, _ in lags[1:]), batch]
            return max(0, *(last - lag for last, (_, lag) in zip(lasts, lags, strict=True)))
        if self.kind == "staged":
            return batch // self.updates_per_stage * self.updates_per_stage
        return batch

    def published_before(self, batch: int) -> int:
        """Return the version published once the batches before `batch` (`steps`: all) are trained, until its commit."""
        return batch if self.kind == "async" or batch == self.steps else self.required_version(batch)

    def publishes_after(self, step: int) -> bool:
        """Return whether version `step + 1` is published after training `step`."""
        stage_ends = self.kind != "staged" or (step + 1) % self.updates_per_stage == 0
        return stage_ends or step + 1 == self.steps

    def __str__(self) -> str:
        return {
            "sync": "sync",
            "async": f"async, lag {self.lag}",
            "staged": f"staged, µ = {self.updates_per_stage}",
        }[self.kind]

    def allows(self, batch: int, version: int) -> bool:
        """Return whether a token of `version` may be part of `batch`, which cannot have newer tokens than its index."""
        return self.required_version(batch) <= version <= batch
