"""Statistics and gradient of log-probabilities over kept sets: the tokens that top-p and top-k left to choose from.

A third back end of `logprobs`, in plain torch, for logits of any device and dtype. The normalizer of a row runs over
its kept tokens alone, so nothing but their logits is read, a few dozen numbers of each row of the vocabulary. That is
why there is no kernel: the gradient is the only pass over all logits, and it fills them with zeros.

Under vocabulary parallelism each rank sums up those kept tokens that its slice holds; `logprobs` adds the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_bridge.model.logprobs_torch import LOWEST, full_precision, is_local
from pipeline.data.batch import KeptSets


@dataclass(frozen=True, kw_only=True)
class KeptRows:
    """The kept set of each row of logits; rows without one (a prompt, padding) have an empty set."""

    owner: Tensor
    """int64 [kept] the row of each entry, ascending."""
    tokens: Tensor
    """int64 [kept] global token ids."""
    counts: Tensor
    """int64 [rows] entries of each row."""

    @staticmethod
    def of(sets: KeptSets) -> KeptRows:
        """On the host, one row a set."""
        return KeptRows(
            owner=torch.from_numpy(np.repeat(np.arange(len(sets)), sets.counts)),
            tokens=torch.from_numpy(sets.tokens.astype(np.int64)),
            counts=torch.from_numpy(sets.counts),
        )

    def to(self, device: torch.device | str) -> KeptRows:
        """The same sets on another device."""
        return KeptRows(owner=self.owner.to(device), tokens=self.tokens.to(device), counts=self.counts.to(device))


def statistics(
    rows: Tensor, wanted: Tensor, temperature: float, kept: KeptRows, first_token: int
) -> tuple[Tensor, Tensor]:
    """As `logprobs_torch.statistics`, over the kept tokens: `rows` [tokens, vocab/tp], of which the first column is the
    token `first_token`; `wanted` int64 [tokens] is counted from there. Rows without a kept token here have sums of 0.
    """
    vocab = rows.shape[-1]
    values = torch.where(_is_here(kept, first_token, vocab), _logits(rows, kept, first_token) / temperature, -torch.inf)
    peak = values.new_full((len(rows),), LOWEST).scatter_reduce(0, kept.owner, values, "amax")
    shifted = values - peak[kept.owner]
    weight = shifted.exp()
    token = rows.gather(1, wanted.clamp(0, vocab - 1)[:, None])[:, 0].to(values.dtype) / temperature - peak
    sums = torch.stack(
        (
            _row_sums(weight, kept),
            torch.where(is_local(wanted, vocab), token, 0),
            _row_sums(weight * shifted.clamp(min=LOWEST), kept),
        )
    )
    return peak, sums


def write_gradient(
    rows: Tensor,
    wanted: Tensor,
    normalizer: Tensor,
    scale: Tensor,
    temperature: float,
    target: Tensor,
    kept: KeptRows,
    first_token: int,
) -> None:
    """As `logprobs_torch.write_gradient`: scale × ([v = wanted] - exp(z / T - normalizer)) on kept tokens, 0 on others.

    `target` may be `rows`.
    """
    vocab = rows.shape[-1]
    factor = scale[kept.owner]
    probability = (_logits(rows, kept, first_token) / temperature - normalizer[kept.owner]).exp()
    chosen = (kept.tokens - first_token == wanted[kept.owner]).to(probability.dtype)
    gradient = torch.where(_is_here(kept, first_token, vocab) & (factor != 0), factor * (chosen - probability), 0)
    target.zero_()
    # Entries of other ranks add 0 to some column of their row. Summing keeps that harmless, in any order.
    target.index_put_((kept.owner, _columns(kept, first_token, vocab)), gradient.to(target.dtype), accumulate=True)


def _columns(kept: KeptRows, first_token: int, vocab: int) -> Tensor:
    return (kept.tokens - first_token).clamp(0, vocab - 1)


def _is_here(kept: KeptRows, first_token: int, vocab: int) -> Tensor:
    return is_local(kept.tokens - first_token, vocab)


def _logits(rows: Tensor, kept: KeptRows, first_token: int) -> Tensor:
    """[kept] in full precision; of entries of other ranks, any column's."""
    return rows[kept.owner, _columns(kept, first_token, rows.shape[-1])].to(full_precision(rows))


def _row_sums(values: Tensor, kept: KeptRows) -> Tensor:
    """[rows] in the entries' order, which a scattered sum on a GPU would not keep."""
    return torch.segment_reduce(values, "sum", lengths=kept.counts, unsafe=True)
