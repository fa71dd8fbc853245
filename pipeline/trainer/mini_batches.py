"""The optimizer steps of one batch: up to `learner.updates_per_batch` of them, each on whole groups of its own.

    batch ──advantages──▶ groups that are trained on ──split──▶ mini-batch 1 … µ ──learner.update──▶ one Update

Trainers such as verl and slime call the parts mini-batches. Advantages, and their normalization over the batch, are
those of the whole batch; what is averaged or counted in an optimizer step (aggregation, the loss's denominator, the
effective sample size of a step) is that of its mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages.compute import AdvantageComputer
from pipeline.data.batch import Batch
from pipeline.ports.learner import Update
from precision.mismatch.statistics import Mismatch
from precision.torch_on_use import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """What one optimizer step takes."""

    batch: Batch
    """Its samples alone. Tokens of samples that are left out of the loss count as not sampled."""
    advantages: NDArray[np.float32]
    """[responses of the mini-batch]"""
    trained: NDArray[np.bool_] | None
    """[samples of the mini-batch] as Learner.update takes it."""
    samples: NDArray[np.bool_]
    """[samples of the whole batch] True on those of the mini-batch."""
    responses: NDArray[np.bool_]
    """[responses of the whole batch] True on those of the mini-batch."""

    def counted(self) -> dict[str, float]:
        """How much of it is run through the model, by the names of metrics."""
        batch = self.batch
        ran = np.ones(batch.num_samples, np.bool_) if self.trained is None else self.trained
        updated = batch.loss_mask & np.repeat(ran, batch.response_lengths)
        return dict(
            num_updated_tokens=float(np.count_nonzero(updated)), num_model_tokens=float(batch.lengths[ran].sum())
        )

    def part_of(self, values: Tensor | None) -> Tensor | None:
        """[responses of the mini-batch] of `values` [responses of the whole batch], where they are; None stays None."""
        return None if values is None else values[self.on_device(values)]

    def on_device(self, values: Tensor) -> Tensor:
        """bool [responses of the whole batch] `responses`, where `values` are."""
        return torch.from_numpy(self.responses).to(values.device)


def mini_batches(computer: AdvantageComputer, batch: Batch, count: int) -> list[MiniBatch]:
    """At most `count` mini-batches, which share no group. They depend on the batch alone, so every rank makes the same
    ones and as many.

    Raises NonFiniteError on a reward that is not finite.
    """
    computed = computer.compute_advantages(batch)
    parts = []
    kept = batch.loss_mask & ~np.repeat(computed.filtered, batch.response_lengths)
    batch = replace(batch, loss_mask=kept) if computed.filtered.any() else batch
    for samples in split_groups(batch.group, computed.in_loss, count):
        part = batch if samples.all() else batch.select(samples)
        through_model = computed.through_model[samples]
        parts.append(
            MiniBatch(
                batch=part,
                advantages=computer.by_token(part, computed.values[samples]).astype(np.float32),
                # Where no sample has an advantage, the step is made of all of them: it needs some token.
                trained=through_model if through_model.any() and not through_model.all() else None,
                samples=samples,
                responses=np.repeat(samples, batch.response_lengths),
            )
        )
    return parts


def dealt_together(computer: AdvantageComputer, count: int, batch: Batch) -> list[NDArray[np.bool_]]:
    """Masks [samples] of what is run through the model together: of each mini-batch the samples that are trained on,
    and those that are scored alone; then those that are in no mini-batch. Needs nothing that is counted in tokens."""
    computed = computer.compute_advantages(batch)
    inside = split_groups(batch.group, computed.in_loss, count)
    found = [part & chosen for part in inside for chosen in (computed.through_model, ~computed.through_model)]
    return [*found, ~np.logical_or.reduce(inside)]


def split_groups(group: NDArray[np.int64], in_loss: NDArray[np.bool_], count: int) -> list[NDArray[np.bool_]]:
    """`count` masks [samples] of whole groups, of those `in_loss` [samples], in the order of the batch.

    Their numbers of groups differ by at most one. Fewer groups than `count` get one mask each.
    """
    _, first, member = np.unique(group, return_index=True, return_inverse=True)
    chosen = np.array(sorted(np.flatnonzero(in_loss[first]), key=lambda number: first[number]))
    return [np.isin(member, part) for part in np.array_split(chosen, min(count, len(chosen)))]


_OVER_UPDATES: dict[str, Callable[[Sequence[float]], float]] = {
    "lr": itemgetter(-1),
    "gradient_retries": sum,
    "num_tokens": sum,
    "num_updated_tokens": sum,
    "num_model_tokens": sum,
    "ratio_max": max,
    "ratio_max_negative": max,
    "ratio_min": min,
    "sequence_log_ratio_max": max,
    "sequence_log_ratio_min": min,
}
"""How a metric of several updates becomes that of the batch; the mean for all others."""


def merge_updates(parts: Sequence[MiniBatch], updates: Sequence[Update]) -> Update:
    """One Update for the batch. Metrics are means over the updates, but for tokens and retries, which add up, the
    extremes, and the learning rate, which is that of the last.
    Log-probabilities are those before the sample's own update; NaN for samples that no update looked at. Mismatch
    statistics stay apart, by update."""
    if len(updates) == 1 and parts[0].responses.all():
        return updates[0]
    logprobs = updates[0].device_logprobs.new_full((len(parts[0].responses),), np.nan)
    for part, update in zip(parts, updates, strict=True):
        logprobs[part.on_device(logprobs)] = update.device_logprobs
    common = [name for name in updates[0].metrics if all(name in update.metrics for update in updates)]
    values = {name: [update.metrics[name] for update in updates] for name in common}
    measured = [update.mismatch for update in updates if update.mismatch is not None]
    return Update(
        metrics={name: float(_OVER_UPDATES.get(name, np.mean)(each)) for name, each in values.items()},
        histogram=np.sum([update.histogram for update in updates], axis=0).tolist(),
        device_logprobs=logprobs,
        mismatch=Mismatch.stack(measured, [part.samples for part in parts]) if measured else None,
    )
