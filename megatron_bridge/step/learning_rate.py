"""The learning rate of every optimizer step, from what the recipe says. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from pipeline.config.recipe import OptimizerSection


@dataclass(frozen=True)
class RateSpan:
    """The learning rate's settings from a batch on."""

    first_batch: int
    section: OptimizerSection
    total_steps: int
    """Optimizer steps of the run, as they were planned then, had every batch `updates_per_batch` of them."""
    updates_per_batch: int = 1


@dataclass(frozen=True)
class LearningRates:
    """The rate of every optimizer step of a run. A start may change its settings; a step that was trained before keeps
    its rate, also when it is trained again."""

    spans: tuple[RateSpan, ...]
    """Ascending by batch, at least one."""

    @classmethod
    def of(cls, section: OptimizerSection, total_steps: int) -> LearningRates:
        """Of a run whose settings were never changed."""
        return cls((RateSpan(0, section, total_steps),))

    def at(self, batch: int, step: int) -> float:
        """Of optimizer step `step` (from 0), which trains on batch `batch`."""
        spans = [one for one in self.spans if one.first_batch <= batch or one is self.spans[0]]
        return learning_rate(step, spans[-1].section, spans[-1].total_steps, partial(_place, spans))


def _place(spans: Sequence[RateSpan], step: int) -> float:
    """Where optimizer step `step` lies among the `total_steps` of the last span: batches of earlier spans count as if
    each had as many steps as its own. It is `step`, exactly, where none had more or fewer."""
    own, begun = spans[-1].updates_per_batch, 0
    for span, after in pairwise(spans):
        planned = (after.first_batch - span.first_batch) * span.updates_per_batch
        if step < begun + planned:
            return span.first_batch * own + (step - begun) * own / span.updates_per_batch
        begun += planned
    return spans[-1].first_batch * own + step - begun


def learning_rate(
    step: int, section: OptimizerSection, total_steps: int, place: Callable[[int], float] = float
) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up, then constant, linear or cosine decay to `min_lr`
    at `decay_steps` or, by default, at the last of `total_steps`.

    `warmup_steps` and `decay_steps` count optimizer steps from the first one of the run, those of a fork's parent
    included. A decay over `total_steps` goes by batches: `place` says where a step lies among them, so a fork with
    another number of steps a batch goes on where its parent's rate was, and is at `min_lr` with its last batch.

    The rate is a function of the step alone, so a resumed run needs no other state. Megatron's OptimizerParamScheduler
    is not used, for three reasons. It refuses a run that is not longer than its warm-up. It takes the first step after
    the warm-up at a decayed rate, never at `lr`. It counts steps by itself, and a checkpoint would have to keep its
    count equal to the learner's.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.decay == "constant":
        return section.lr
    if section.decay_steps is not None:
        place, total_steps = float, section.decay_steps
    warm = place(section.warmup_steps)
    span = max(1.0, total_steps - 1 - warm)
    done = min(1.0, (place(step) - warm) / span)
    left = 1.0 - done if section.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return section.min_lr + (section.lr - section.min_lr) * left
