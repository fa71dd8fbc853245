"""From one advantage a sample to one a token: normalized over the batch, weighed by what the mean counts alike.

An objective averages over the N sampled tokens of the step. A factor on the advantages turns that mean into another
one, because every policy term is linear in the advantage; terms without an advantage (a KL anchor) stay token means.

    token     1                     every token alike (DAPO, arXiv 2503.14476)
    sequence  N / (R n_i)           every response alike (GRPO, arXiv 2402.03300, eq. 3); n_i its tokens, R responses
    prompt    N / (P n_g)           every prompt alike, its tokens alike (ScaleRL, arXiv 2510.13786); n_g its tokens
    constant  N / (samples × L)     the sum over tokens by a constant: samples times the longest response (Dr. GRPO,
                                    arXiv 2503.20783)

The first three sum to N over the tokens; `constant` does only when every response is of the greatest length, which is
its point: a long response then counts more, and a short batch takes a shorter step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.config.algorithm import AdvantageSection
from pipeline.data.records import Batch


def token_advantages(
    section: AdvantageSection, batch: Batch, per_sample: NDArray[np.float32], *, max_new_tokens: int
) -> NDArray[np.float32]:
    """[responses] float32: the advantages [samples] of a batch as its tokens get them; 0 on forced tokens.

    `max_new_tokens` is the length L of `constant`.
    """
    advantages = batch_normalized(per_sample) if section.batch_normalized else per_sample.astype(np.float64)
    factors = _factors(section.aggregation, batch, max_new_tokens)
    sample = np.repeat(np.arange(batch.num_samples), batch.response_lengths)
    return np.where(batch.loss_mask, (advantages * factors)[sample], 0.0).astype(np.float32)


def batch_normalized(per_sample: NDArray[np.float32]) -> NDArray[np.float64]:
    """[samples] divided by the standard deviation (samples - 1 in the denominator) of all advantages of the batch
    (ScaleRL, arXiv 2510.13786, recipe). Groups without contrast count, also where they are dropped: dropping must save
    time and change nothing else."""
    values = per_sample.astype(np.float64)
    std = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return values / std if std > 0.0 else values


def informative_samples(batch: Batch, per_sample: NDArray[np.float32]) -> NDArray[np.bool_]:
    """[samples] False where no sample of the group has an advantage: such a group's policy gradient is 0."""
    _, group = np.unique(batch.group, return_inverse=True)
    return np.asarray(np.bincount(group, per_sample != 0.0)[group] > 0)


def _factors(aggregation: str, batch: Batch, max_new_tokens: int) -> NDArray[np.float64]:
    """[samples] the factor of a sample's tokens."""
    ends = np.concatenate([[0], np.cumsum(batch.loss_mask)])[batch.response_offsets]
    lengths = np.diff(ends).astype(np.float64)
    num_tokens = lengths.sum()
    if aggregation == "token":
        return np.ones(batch.num_samples)
    if aggregation == "constant":
        return np.full(batch.num_samples, num_tokens / max(1, batch.num_samples * max_new_tokens))
    parts = np.arange(batch.num_samples) if aggregation == "sequence" else batch.group
    _, part = np.unique(parts, return_inverse=True)
    part_lengths = np.bincount(part, lengths)
    # A response without any sampled token is no part of the mean: the factors must sum to N.
    num_parts = max(1, np.count_nonzero(part_lengths))
    return np.asarray(num_tokens / (num_parts * np.maximum(part_lengths, 1.0))[part])
