"""The learning rate of every optimizer step, from what the recipe says. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.config.recipe import OptimizerSection


@dataclass(frozen=True)
class RateSpan:
    """The learning rate's settings from a batch on."""

    first_batch: int
    section: OptimizerSection
    total_steps: int
    """Optimizer steps of the run, as they were planned then."""


@dataclass(frozen=True)
class LearningRates:
    """The rate of every optimizer step of a run. A start may change its settings; a step that was trained before keeps
    its rate, also when it is trained again (decision 0076)."""

    spans: tuple[RateSpan, ...]
    """Ascending by batch, at least one."""

    @classmethod
    def of(cls, section: OptimizerSection, total_steps: int) -> LearningRates:
        """Of a run whose settings were never changed."""
        return cls((RateSpan(0, section, total_steps),))

    def at(self, batch: int, step: int) -> float:
        """Of optimizer step `step` (from 0), which trains on batch `batch`."""
        span = [one for one in self.spans if one.first_batch <= batch or one is self.spans[0]][-1]
        return learning_rate(step, span.section, span.total_steps)


def learning_rate(step: int, section: OptimizerSection, total_steps: int) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up, then constant, linear or cosine decay to `min_lr`
    at `decay_steps` or, by default, at the last of `total_steps`.

    The rate is a function of the step alone, so a resumed run needs no other state. Megatron's OptimizerParamScheduler
    is not used, for three reasons. It refuses a run that is not longer than its warm-up. It takes the first step after
    the warm-up at a decayed rate, never at `lr`. It counts steps by itself, and a checkpoint would have to keep its
    count equal to the learner's.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.decay == "constant":
        return section.lr
    span = max(1, (section.decay_steps or total_steps) - 1 - section.warmup_steps)
    done = min(1.0, (step - section.warmup_steps) / span)
    left = 1.0 - done if section.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return section.min_lr + (section.lr - section.min_lr) * left
