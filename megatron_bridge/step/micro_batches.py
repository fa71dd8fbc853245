"""Flat, ragged batch → this rank's packed micro-batches, and back.

    samples ──as much arithmetic──▶ data parallel ranks ──as many tokens──▶ micro-batches of packed rows
              (before they are read: `deal`)            ──two pieces of every row──▶ context parallel ranks

The partition depends on lengths only, so every rank works out the whole plan by itself and all agree. Data parallel
ranks are balanced by arithmetic, because the step takes as long as the busiest one and a long row takes more of it a
token; micro-batches by tokens, because these are what memory has room for. Their longest row comes first.

Rows follow one another without padding between them, but for what context and sequence parallelism need to divide them
evenly; what FP8 needs is added to the last. A position predicts the next token: `labels[0, t]` follows `tokens[0, t]`.
Every rank gets the same number of micro-batches; a rank with too few rows gets some that are masked out entirely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from megatron_bridge.model.logprobs import KeptRows
from pipeline.data.batch import Batch, KeptSets
from pipeline.data.routed_experts import RoutedExperts
from pipeline.errors import RecipeError
from precision.balance import balanced, fullest, sections


@dataclass(kw_only=True, eq=False)
class TokenRows:
    """Sequences of which a tail is to be predicted.

    The predicted tokens of all rows, row after row, are the flat order in which results are given and returned. A rank
    may hold some rows alone; it knows how long the others are.
    """

    tokens: Sequence[NDArray[np.int32]]
    """[rows] of [length] token ids; none of rows that other ranks hold."""
    starts: NDArray[np.int64]
    """[rows] index of the first predicted token, at least 1."""
    kept: KeptSets | None = None
    """The set over which the distribution of each predicted token that is held is renormalized; None: the whole
    vocabulary."""
    experts: RoutedExperts | None = None
    """[tokens of the held rows] to replay; None: routers choose."""
    ranks: NDArray[np.int64] | None = None
    """[rows] the data parallel rank that holds each; None: every rank holds all, and they are still to be dealt out."""
    all_lengths: NDArray[np.int64] | None = None
    """[rows] `lengths`, where not all rows are held."""

    @staticmethod
    def of_batch(batch: Batch) -> TokenRows:
        """Every sample, its response predicted."""
        return TokenRows(
            tokens=batch.rows(),
            starts=batch.prompt_lengths.astype(np.int64),
            kept=batch.kept,
            experts=batch.experts,
            ranks=None if batch.share is None else batch.share.ranks,
            all_lengths=batch.lengths,
        )

    @staticmethod
    def whole(rows: Sequence[Sequence[int]]) -> TokenRows:
        """Every token but the first predicted."""
        tokens = [np.asarray(row, np.int32) for row in rows]
        return TokenRows(tokens=tokens, starts=np.ones(len(rows), np.int64))

    def beginnings(self, lengths: NDArray[np.int64]) -> TokenRows:
        """The first tokens of each row, `lengths` [rows] of them."""
        place = np.arange(self.token_offsets[-1]) - np.repeat(self.token_offsets[:-1], self.held_lengths)
        stays = place < np.repeat(lengths, self.held_lengths)
        predicted = place >= np.repeat(self.starts, self.held_lengths)
        return replace(
            self,
            tokens=[row[:length] for row, length in zip(self.tokens, lengths, strict=True)],
            kept=None if self.kept is None else self.kept.take(np.flatnonzero(stays[predicted])),
            experts=None if self.experts is None else self.experts[stays],
            all_lengths=None if self.all_lengths is None else lengths,
        )

    lengths: NDArray[np.int64] = field(init=False)
    """[rows] tokens."""
    held_lengths: NDArray[np.int64] = field(init=False)
    """[rows] tokens that are here."""
    token_offsets: NDArray[np.int64] = field(init=False)
    """[rows + 1] where each held row starts when all of them are laid end to end."""
    offsets: NDArray[np.int64] = field(init=False)
    """[rows + 1] where each row's predicted tokens start in the flat order."""
    kept_offsets: NDArray[np.int64] = field(init=False)
    """[rows + 1] where the sets of each held row's predicted tokens start in `kept`."""

    def __post_init__(self) -> None:
        self.held_lengths = np.fromiter(map(len, self.tokens), np.int64, len(self.tokens))
        self.lengths = self.held_lengths if self.all_lengths is None else self.all_lengths
        self.token_offsets = _ends(self.held_lengths)
        self.offsets = _ends(np.maximum(self.lengths - self.starts, 0))
        self.kept_offsets = _ends(np.maximum(self.held_lengths - self.starts, 0))


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Packed rows. Tensors are [1, tokens] (of this context parallel rank) but for `row_ends` and `kept`."""

    tokens: Tensor
    """int64; 0 where padded."""
    labels: Tensor
    """int64, the token that follows; 0 where padded."""
    positions: Tensor
    """int64, within the row."""
    mask: Tensor
    """bool, True where the label is a predicted (response) token."""
    index: Tensor
    """int64, place of the label in the flat order; 0 where `mask` is False."""
    places: Tensor
    """int64, place of the token among those of the held rows, laid end to end; -1 where padded."""
    row_ends: Tensor
    """int32 [rows + 1], where the rows begin and end over all context parallel ranks together, from 0."""
    kept: KeptRows | None = None
    """A kept set for each of this rank's labels, empty where `mask` is False."""

    def scatter(self, flat: Tensor) -> Tensor:
        """Flat values [predicted] laid out as [1, tokens]; 0 where masked out."""
        if flat.numel() == 0:
            return torch.zeros(self.mask.shape, dtype=flat.dtype, device=flat.device)
        return torch.where(self.mask, flat[self.index], 0)

    def gather_into(self, flat: Tensor, values: Tensor) -> None:
        """Write values [1, tokens] to their places in `flat` [predicted]."""
        flat[self.index[self.mask]] = values[self.mask].to(flat.dtype)

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch on another device; `row_ends` too, for that is where the kernels read it."""
        moved = dict[str, Any]()
        for name, value in vars(self).items():
            moved[name] = None if value is None else value.to(device)
        return MicroBatch(**moved)

    @staticmethod
    def pack(rows: TokenRows, group: Sequence[int], widths: NDArray[np.int64], split: Split) -> MicroBatch:
        """Lay out the rows of a `group`, each of a width of `widths` [rows]. The last one takes up what the whole lacks
        to its multiple; without rows, all of it is padding."""
        padded = widths[group].tolist() or [split.row_multiple]
        padded[-1] += -sum(padded) % split.total_multiple
        ends = _ends(padded)
        tokens, labels, index, positions = np.zeros((4, ends[-1]), np.int64)
        places, sets = np.full((2, ends[-1]), -1, np.int64)
        mask = np.zeros(ends[-1], np.bool_)
        for width, first in zip(padded, ends, strict=False):
            positions[first : first + width] = np.arange(width)
        for row, first in zip(group, ends, strict=False):
            ids, start, end = rows.tokens[row], int(rows.starts[row]), int(rows.lengths[row])
            if start < 1:
                raise ValueError(f"row {row} predicts from token {start}; the first token has nothing before it")
            tokens[first : first + end - 1] = ids[:-1]
            labels[first : first + end - 1] = ids[1:]
            places[first : first + end - 1] = rows.token_offsets[row] + np.arange(end - 1)
            if end > start:
                mask[first + start - 1 : first + end - 1] = True
                index[first + start - 1 : first + end - 1] = np.arange(rows.offsets[row], rows.offsets[row + 1])
                sets[first + start - 1 : first + end - 1] = np.arange(*rows.kept_offsets[row : row + 2])
        columns = zigzag_columns(padded, split.context_ranks, split.context_rank)
        whole = dict(tokens=tokens, labels=labels, positions=positions, mask=mask, index=index, places=places)
        held = dict[str, Tensor]()
        for name, values in whole.items():
            held[name] = torch.from_numpy(values)[columns][None]
        return MicroBatch(
            **held,
            row_ends=torch.from_numpy(ends.astype(np.int32)),
            kept=None if rows.kept is None else KeptRows.of(rows.kept.take(sets[columns.numpy()])),
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One rank's share of a batch."""

    micro_batches: tuple[MicroBatch, ...]
    rows: NDArray[np.bool_]
    """[rows] True on those that this rank runs through the model."""
    padding_share: float
    """Padded positions ÷ all positions, over all ranks."""


@dataclass(kw_only=True)
class Split:
    """How a batch is divided over ranks, and what Megatron asks of the pieces."""

    data_ranks: int = 1
    data_rank: int = 0
    context_ranks: int = 1
    context_rank: int = 0
    sequence_ranks: int = 1
    """Tensor parallel ranks over which the tokens of a context parallel rank are split."""
    token_multiple: int = 1
    """Of the tokens that each rank is left with: what FP8 products ask for."""
    count_multiple: int = 1
    """Of the number of micro-batches."""
    attention_parity: int | None = None
    """See ModelConfig.attention_parity; None: attention counts for nothing."""

    row_multiple: int = field(init=False)
    """Of a padded row: each context parallel rank holds two pieces of it."""
    total_multiple: int = field(init=False)
    """Of all rows of a micro-batch together."""

    def __post_init__(self) -> None:
        self.row_multiple = 2 * self.context_ranks if self.context_ranks > 1 else 1
        whole = self.context_ranks * self.token_multiple
        self.total_multiple = math.lcm(self.row_multiple, whole) * self.sequence_ranks


def plan_micro_batches(
    rows: TokenRows, *, micro_batch_tokens: int, split: Split, chosen: NDArray[np.bool_] | None = None
) -> Plan:
    """Partition `rows` over data parallel ranks and micro-batches of at most `micro_batch_tokens` tokens.

    The number of micro-batches is the smallest, the same on all ranks, that keeps the budget. `chosen` [rows] leaves
    rows out; the places of the others in the flat order stay. Raises RecipeError when a single row does not fit.
    """
    included = np.ones(len(rows.lengths), np.bool_) if chosen is None else chosen
    # What a row takes in a micro-batch: its last token predicts nothing.
    widths = _rounded_up(np.maximum(rows.lengths - 1, 1), split.row_multiple)
    budget = micro_batch_tokens // split.total_multiple * split.total_multiple
    if len(widths) and widths.max() > budget:
        raise RecipeError(
            f"a sample of {rows.lengths.max()} tokens, padded to {widths.max()}, does not fit in "
            f"learner.micro_batch_tokens {micro_batch_tokens}; raise it"
        )
    ranks = deal(rows.lengths, split, [included]) if rows.ranks is None else rows.ranks
    shares, tokens = [], []
    for rank in range(split.data_ranks):
        share = np.flatnonzero(included & (ranks == rank))
        shares.append(share[np.argsort(-widths[share], kind="stable")])  # the longest first
        tokens.append(widths[shares[rank]].tolist())
    count = _rounded_up(max(1, -(-max(map(sum, tokens)) // budget)), split.count_multiple)
    while True:
        dealt = [balanced(each, count) for each in tokens]
        if max(map(fullest, tokens, dealt)) <= budget:
            break
        count += split.count_multiple
    positions = 0
    for each, parts in zip(tokens, dealt, strict=True):
        for part in parts:
            positions += _rounded_up(fullest(each, [part]) or split.row_multiple, split.total_multiple)
    share, parts = shares[split.data_rank], dealt[split.data_rank]
    real = int(np.maximum(rows.lengths[included] - 1, 0).sum())
    return Plan(
        micro_batches=tuple([MicroBatch.pack(rows, share[part].tolist(), widths, split) for part in parts]),
        rows=included & (ranks == split.data_rank),
        padding_share=1.0 - real / positions,
    )


def deal(lengths: NDArray[np.int64], split: Split, together: Sequence[NDArray[np.bool_]]) -> NDArray[np.int64]:
    """[rows] the data parallel rank that takes each row of these `lengths` [rows]. Each set of rows in `together`
    [rows] is dealt out evenly by itself, for there are passes over it alone. Rows of none go to rank 0."""
    ranks = np.zeros(len(lengths), np.int64)
    work = _rounded_up(np.maximum(lengths - 1, 1), split.row_multiple)
    if split.attention_parity is not None:  # of a rank's time, in no particular unit
        work = work * (split.attention_parity + work)
    for rows in map(np.flatnonzero, together):
        for rank, part in enumerate(sections(work[rows].tolist(), split.data_ranks)):
            ranks[rows[part]] = rank
    return ranks


def zigzag_columns(lengths: Sequence[int], num_ranks: int, rank: int) -> Tensor:
    """int64: the places that context parallel `rank` holds of rows of these lengths, packed one after another.

    Of 2 × num_ranks pieces of every row it holds number `rank` and number 2 × num_ranks − 1 − `rank`.
    """
    if num_ranks == 1:
        return torch.arange(sum(lengths))
    starts = _ends(lengths)
    held = []
    for start, length in zip(starts, lengths, strict=False):
        pieces = (torch.arange(length) + int(start)).chunk(2 * num_ranks)
        held += [pieces[rank], pieces[2 * num_ranks - 1 - rank]]
    return torch.cat(held)


Count = TypeVar("Count", int, NDArray[np.int64])


def _ends(counts: ArrayLike) -> NDArray[np.int64]:
    """[n + 1] from `counts` [n]: where each begins when they are laid end to end, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _rounded_up(count: Count, multiple: int) -> Count:
    return -(-count // multiple) * multiple
