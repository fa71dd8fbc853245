"""From one advantage a sample to one a token: normalized over the batch, weighed by what the mean counts alike.

An objective averages over the N sampled tokens of an optimizer step. A factor on the advantages turns that mean into
another one, because every policy term is linear in the advantage; terms without an advantage (a KL anchor) stay token
means. N, R, P and the samples are those of the step: of the batch, or of a part of it (learner.updates_per_batch).

    token     1                     every token alike (DAPO, arXiv 2503.14476)
    sequence  N / (R n_i)           every response alike (GRPO, arXiv 2402.03300, eq. 3); n_i its tokens, R responses
    prompt    N / (P n_g)           every prompt alike, its tokens alike (ScaleRL, arXiv 2510.13786); n_g its tokens
    constant  N / (R L)             the sum over tokens by a constant: responses times the longest (Dr. GRPO,
                                    arXiv 2503.20783)

The first three sum to N over the tokens; `constant` does only when every response is of the greatest length, which is
its point: a long response then counts more, and a short batch takes a shorter step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batch import Batch
from precision.objectives.base import Aggregation


def token_advantages(
    aggregation: Aggregation,
    step: Batch,
    values: NDArray[np.float64],
    of_tokens: NDArray[np.float64] | None = None,
    *,
    max_new_tokens: int,
) -> NDArray[np.float64]:
    """[responses]: the advantages `values` [samples] of a step, and those that tokens have beside them `of_tokens`
    [responses], as its tokens get them; 0 where no engine sampled.

    `max_new_tokens` is the length L of `constant`.
    """
    factors = _factors(aggregation, step, max_new_tokens)
    sample = np.repeat(np.arange(step.num_samples), step.response_lengths)
    advantages = values[sample] if of_tokens is None else values[sample] + of_tokens
    return np.where(step.loss_mask, advantages * factors[sample], 0.0)


def batch_normalized(values: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """`values` [samples] divided by the standard deviation (samples - 1 in the denominator) of those that are
    `counted` [samples] (ScaleRL, arXiv 2510.13786, recipe: A^norm). Values that are all equal stay as they are."""
    kept = values[counted]
    std = float(np.std(kept, ddof=1)) if len(kept) > 1 else 0.0
    return values / std if std > 0.0 else values


def _factors(aggregation: Aggregation, batch: Batch, max_new_tokens: int) -> NDArray[np.float64]:
    """[samples] the factor of a sample's tokens."""
    ends = np.concatenate([[0], np.cumsum(batch.loss_mask)])[batch.response_offsets]
    lengths = np.diff(ends).astype(np.float64)
    num_tokens = lengths.sum()
    if aggregation == "token":
        return np.ones(batch.num_samples)
    if aggregation == "constant":
        return np.full(batch.num_samples, num_tokens / max(1, np.count_nonzero(lengths) * max_new_tokens))
    parts = np.arange(batch.num_samples) if aggregation == "sequence" else batch.group
    _, part = np.unique(parts, return_inverse=True)
    part_lengths = np.bincount(part, lengths)
    # A response without any sampled token is no part of the mean: the factors must sum to N.
    num_parts = max(1, np.count_nonzero(part_lengths))
    return np.asarray(num_tokens / (num_parts * np.maximum(part_lengths, 1.0))[part])
