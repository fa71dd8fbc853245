"""Statistics and gradient of vocabulary-parallel log-probabilities in plain torch, for logits of any device and dtype.

The back end of `logprobs` on a CPU. Rows are worked through in chunks, so that beside the logits themselves only
one chunk ever exists in full precision.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LOWEST = -1e30
"""Stands in for -inf where 0 × -inf or inf - inf would follow; its exponential is 0."""

_CHUNK_ELEMENTS = 1 << 22
"""Elements of a chunk in full precision: 16 MiB of float32."""


def statistics(rows: Tensor, wanted: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """What `logprobs` asks of a back end: `rows` [tokens, vocab/tp] and `wanted` int64 [tokens]."""
    vocab = rows.shape[-1]
    peak = (rows.amax(-1).to(full_precision(rows)) / temperature).clamp_(min=LOWEST)
    sums = peak.new_zeros(3, len(rows))
    for part in _chunks(len(rows), vocab):
        shifted = _copied(rows[part]).div_(temperature).sub_(peak[part, None])
        sums[1, part] = _pick(shifted, wanted[part])
        weight = shifted.exp()
        sums[0, part] = weight.sum(-1)
        sums[2, part] = weight.mul_(shifted.clamp_(min=LOWEST)).sum(-1)
    return peak, sums


def write_gradient(
    rows: Tensor, wanted: Tensor, normalizer: Tensor, scale: Tensor, temperature: float, target: Tensor
) -> None:
    """Fill `target` [tokens, vocab/tp], which may be `rows`, with scale × ([v = wanted] - exp(z / T - normalizer)).

    `normalizer` and `scale` are [tokens]; rows of scale 0 become 0, whatever their logits.
    """
    vocab = rows.shape[-1]
    for part in _chunks(len(rows), vocab):
        probability = _copied(rows[part]).div_(temperature).sub_(normalizer[part, None]).exp_()
        gradient = probability.mul_(-scale[part, None])
        here = is_local(wanted[part], vocab)
        gradient.scatter_add_(1, wanted[part].clamp(0, vocab - 1)[:, None], torch.where(here, scale[part], 0)[:, None])
        target[part] = gradient.masked_fill_((scale[part] == 0)[:, None], 0).to(rows.dtype)


def is_local(wanted: Tensor, vocab: int) -> Tensor:
    """Whether this rank's slice of `vocab` tokens has the wanted one, which is counted from the slice's first."""
    return (wanted >= 0) & (wanted < vocab)


def full_precision(rows: Tensor) -> torch.dtype:
    """What sums over these logits are taken in: float32, or float64 for float64."""
    return torch.promote_types(rows.dtype, torch.float32)


def _copied(rows: Tensor) -> Tensor:
    return rows.to(full_precision(rows), copy=True)


def _pick(shifted: Tensor, wanted: Tensor) -> Tensor:
    """[rows] the shifted logit of the wanted token, 0 where another rank holds it."""
    vocab = shifted.shape[-1]
    picked = shifted.gather(1, wanted.clamp(0, vocab - 1)[:, None])[:, 0]
    return torch.where(is_local(wanted, vocab), picked, 0)


def _chunks(num_rows: int, vocab: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // vocab)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
