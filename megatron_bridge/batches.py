"""Flat, ragged batch → this data parallel rank's padded micro-batches, and back.

    samples ──longest first, to the least loaded rank──▶ shares ──longest first, until full──▶ micro-batches [b, s]
                                                                  ──columns──▶ context parallel ranks [b, s / ranks]

The partition depends on lengths only, so every rank works out the whole plan by itself and all agree. A position of a
micro-batch predicts the next token: `labels[i, t]` follows `tokens[i, t]`. Every rank gets the same number of
micro-batches; a rank that runs out gets ones that are masked out entirely.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.errors import RecipeError
from pipeline.records import Batch


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Sequences of which a tail is to be predicted.

    The predicted tokens of all rows, row after row, are the flat order in which results are given and returned.
    """

    tokens: Sequence[NDArray[np.int32]]
    """[rows] of [length] token ids."""
    starts: NDArray[np.int64]
    """[rows] index of the first predicted token, at least 1."""

    @staticmethod
    def of_batch(batch: Batch) -> TokenRows:
        """Every sample, its response predicted."""
        rows = [batch.sample_tokens(i) for i in range(batch.num_samples)]
        return TokenRows(tokens=rows, starts=batch.prompt_lengths.astype(np.int64))

    @staticmethod
    def whole(rows: Sequence[Sequence[int]]) -> TokenRows:
        """Every token but the first predicted."""
        return TokenRows(tokens=[np.asarray(row, np.int32) for row in rows], starts=np.ones(len(rows), np.int64))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[rows] tokens."""
        return np.array([len(row) for row in self.tokens], np.int64)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """[rows + 1] where each row's predicted tokens start in the flat order."""
        predicted = np.maximum(self.lengths - self.starts, 0)
        return np.concatenate([[0], np.cumsum(predicted)]).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Padded rows; all fields [batch, sequence]."""

    tokens: Tensor
    """int64; 0 where padded."""
    labels: Tensor
    """int64, the token that follows; 0 where padded."""
    positions: Tensor
    """int64"""
    mask: Tensor
    """bool, True where the label is a predicted (response) token."""
    index: Tensor
    """int64, place of the label in the flat order; 0 where `mask` is False."""

    def scatter(self, flat: Tensor) -> Tensor:
        """Flat values [predicted] laid out as [batch, sequence]; 0 where masked out."""
        if flat.numel() == 0:
            return torch.zeros(self.mask.shape, dtype=flat.dtype, device=flat.device)
        return torch.where(self.mask, flat[self.index], 0)

    def gather_into(self, flat: Tensor, values: Tensor) -> None:
        """Write values [batch, sequence] to their places in `flat` [predicted]."""
        flat[self.index[self.mask]] = values[self.mask].to(flat.dtype)

    def columns(self, positions: Tensor) -> MicroBatch:
        """The same rows at some positions only."""
        return MicroBatch(**{name: getattr(self, name)[:, positions] for name in self.__dataclass_fields__})

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch on another device."""
        return MicroBatch(**{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One rank's share of a batch."""

    micro_batches: tuple[MicroBatch, ...]
    padding_share: float
    """Padded positions ÷ all positions, over all ranks."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a batch is divided over ranks, and what Megatron asks of the pieces."""

    data_ranks: int = 1
    data_rank: int = 0
    context_ranks: int = 1
    context_rank: int = 0
    width_multiple: int = 1
    """Of a micro-batch's padded width, over all context parallel ranks."""
    count_multiple: int = 1
    """Of the number of micro-batches."""


def plan_micro_batches(rows: TokenRows, *, micro_batch_tokens: int, split: Split) -> Plan:
    """Partition `rows` over data parallel ranks and micro-batches of at most `micro_batch_tokens` padded tokens.

    Raises RecipeError when a single row does not fit.
    """
    # The last token predicts nothing.
    widths = _rounded_up(np.maximum(rows.lengths - 1, 1), split.width_multiple)
    if len(widths) and widths.max() > micro_batch_tokens:
        raise RecipeError(
            f"a sample of {rows.lengths.max()} tokens, padded to {widths.max()}, does not fit in "
            f"learner.micro_batch_tokens {micro_batch_tokens}; raise it"
        )
    shares = [_fill(share, widths, micro_batch_tokens) for share in _share(widths, split.data_ranks)]
    steps = _rounded_up(max(1, max(len(share) for share in shares)), split.count_multiple)
    real = int(np.maximum(rows.lengths - 1, 0).sum())
    padded = sum(int(widths[group[0]]) * len(group) for share in shares for group in share)
    padded += sum(steps - len(share) for share in shares) * split.width_multiple  # a dummy is as narrow as may be
    mine = [*shares[split.data_rank], *([[]] * (steps - len(shares[split.data_rank])))]
    return Plan(
        micro_batches=tuple(_on_context_rank(_micro_batch(rows, group, split), split) for group in mine),
        padding_share=1.0 - real / padded if padded else 0.0,
    )


Count = TypeVar("Count", int, NDArray[np.int64])


def _rounded_up(count: Count, multiple: int) -> Count:
    return -(-count // multiple) * multiple


def _on_context_rank(whole: MicroBatch, split: Split) -> MicroBatch:
    if split.context_ranks == 1:
        return whole
    return whole.columns(zigzag_positions(whole.tokens.shape[1], split.context_ranks, split.context_rank))


def _share(widths: NDArray[np.int64], num_ranks: int) -> list[list[int]]:
    """Longest row first, each to the rank with the fewest tokens so far; ties go to the lower index."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for row in np.argsort(-widths, kind="stable"):
        load, rank = heapq.heappop(loads)
        shares[rank].append(int(row))
        heapq.heappush(loads, (load + int(widths[row]), rank))
    return shares


def _fill(share: list[int], widths: NDArray[np.int64], budget: int) -> list[list[int]]:
    """Rows of falling width into groups whose padded size stays within the budget."""
    groups: list[list[int]] = []
    for row in share:
        if groups and widths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _micro_batch(rows: TokenRows, group: Sequence[int], split: Split) -> MicroBatch:
    lengths, offsets = rows.lengths, rows.offsets
    width = _rounded_up(max([1, *(int(lengths[row]) - 1 for row in group)]), split.width_multiple)
    size = (max(1, len(group)), width)
    tokens, labels, index = (np.zeros(size, np.int64) for _ in range(3))
    mask = np.zeros(size, np.bool_)
    for line, row in enumerate(group):
        ids, start, end = rows.tokens[row], int(rows.starts[row]), int(lengths[row])
        if start < 1:
            raise ValueError(f"row {row} predicts from token {start}; the first token has nothing before it")
        tokens[line, : end - 1] = ids[:-1]
        labels[line, : end - 1] = ids[1:]
        if end > start:
            mask[line, start - 1 : end - 1] = True
            index[line, start - 1 : end - 1] = np.arange(offsets[row], offsets[row + 1])
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        positions=torch.arange(width).expand(size).contiguous(),
        mask=torch.from_numpy(mask),
        index=torch.from_numpy(index),
    )


def zigzag_positions(length: int, num_ranks: int, rank: int) -> Tensor:
    """int64 [length / num_ranks]: the positions that `rank` holds. `length` must be a multiple of 2 × num_ranks."""
    pieces = torch.arange(length).chunk(2 * num_ranks)
    return torch.cat([pieces[rank], pieces[2 * num_ranks - 1 - rank]]) if num_ranks > 1 else torch.arange(length)
