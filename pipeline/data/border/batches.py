"""The rules of `values` for a whole batch: nothing else is committed, read for training, or sound."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pipeline.data.border.values import (
    HIGHEST_LOGPROB,
    LOWEST_LOGPROB,
    MOST_TOKENS,
    UNKNOWN,
    Fault,
    Limits,
    Responses,
    part_names_fault,
    response_faults,
)
from pipeline.data.records import FINISH_REASONS, Batch

_ABORT = FINISH_REASONS.index("abort")


def batch_faults(batch: Batch, limits: Limits = UNKNOWN) -> Iterator[Fault]:
    """The first fault of each kind, in a batch whose arrays agree with one another (batch_format.check_batch); of a
    share, those of the samples that are held."""
    if batch.share is not None:
        numbers = batch.held_samples
        yield from (Fault(int(numbers[fault.sample]), fault.what) for fault in batch_faults(batch.alone(), limits))
        return
    yield from response_faults(_responses(batch), limits)
    yield from _teacher_faults(batch)
    yield from _prompt_faults(batch, limits)
    yield from _of_samples(batch.finish == _ABORT, "it was aborted, expected samples that ended")
    yield from _of_samples(~np.isfinite(batch.reward), "its reward is no finite number")
    if (names := part_names_fault(batch.reward_parts)) is not None:
        yield Fault(0, names)
    for name, values in batch.reward_parts.items():
        yield from _of_samples(np.isinf(values), f"its reward part {name} is infinite")  # NaN: it has no such part
    if batch.experts is not None and limits.num_experts is not None and batch.experts.ids.size:
        found = int(batch.experts.ids.max())
        if found >= limits.num_experts:
            place = int(np.argmax((batch.experts.ids >= limits.num_experts).any(axis=(1, 2))))
            sample = int(np.searchsorted(batch.sample_offsets, place, side="right")) - 1
            yield Fault(sample, f"a token went to expert {found}, expected 0 to {limits.num_experts - 1}")


def check_values(batch: Batch, limits: Limits = UNKNOWN) -> None:
    """Raises ValueError, naming a sample and what is wrong with it."""
    for fault in islice(batch_faults(batch, limits), 1):
        raise ValueError(str(fault))


def _responses(batch: Batch) -> Responses:
    return Responses(
        offsets=batch.response_offsets,
        tokens=batch.response_tokens,
        logprobs=batch.rollout_logprobs,
        versions=batch.policy_version,
        sampled=batch.loss_mask,
        may_be_empty=np.zeros(batch.num_samples, np.bool_),
        queued_s=batch.queued_s,
        generated_s=batch.generated_s,
        kept=batch.kept,
    )


def _teacher_faults(batch: Batch) -> Iterator[Fault]:
    if (taught := batch.teacher_logprobs) is None:
        return
    possible = np.isfinite(taught) & (taught >= LOWEST_LOGPROB) & (taught <= HIGHEST_LOGPROB)
    bad = np.where(batch.loss_mask, ~possible, taught != 0.0)
    for place in np.flatnonzero(bad)[:1].tolist():
        sample = int(np.searchsorted(batch.response_offsets, place, side="right")) - 1
        yield Fault(sample, f"the teacher gave a token {taught[place]:g}, expected a log-probability, 0 if not sampled")


def _prompt_faults(batch: Batch, limits: Limits) -> Iterator[Fault]:
    yield from _of_samples(batch.prompt_lengths < 1, "it has no prompt, expected one token at least")
    vocab_size = MOST_TOKENS if limits.vocab_size is None else limits.vocab_size
    for place in np.flatnonzero((batch.tokens < 0) | (batch.tokens >= vocab_size))[:1].tolist():
        sample = int(np.searchsorted(batch.sample_offsets, place, side="right")) - 1
        yield Fault(sample, f"token id {batch.tokens[place]}, expected 0 to {vocab_size - 1}")


def _of_samples(bad: NDArray[np.bool_], what: str) -> Iterator[Fault]:
    yield from (Fault(sample, what) for sample in np.flatnonzero(bad)[:1].tolist())
