"""Lay out a flat, ragged batch as this rank's packed micro-batches, and map their results back to the flat order.

    samples ──as much arithmetic──▶ data parallel ranks ──as many tokens──▶ micro-batches of packed rows
              (before they are read: `deal`)            ──two pieces of every row──▶ context parallel ranks

The partition depends on lengths only, so every rank computes the whole plan alone and all agree. Data parallel ranks
are balanced by arithmetic, because a step takes as long as its busiest rank and a long row costs more per token.
Micro-batches are balanced by tokens, because tokens fill the memory. Their longest row comes first.

Rows follow one another without padding, except that context parallelism needs rows that divide evenly. What a
micro-batch lacks of its length is a row of its own at the end, so attention never mixes it with others, and nothing
there is predicted: sequence parallelism and FP8 need even lengths, and pipeline stages need one length, because they
exchange tensors whose shape both must know. A position predicts the next token: `labels[0, t]` follows `tokens[0, t]`.
Every rank gets the same number of micro-batches; a rank with too few rows gets some that are masked out entirely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bridge.model.logprobs import KeptRows
from pipeline.data.batch import Batch, KeptSets, offsets_of
from pipeline.data.routed_experts import RoutedExperts
from pipeline.errors import RecipeError
from precision.balance import balanced, fullest, sections


@dataclass(kw_only=True, eq=False)
class TokenRows:
    """Token sequences, each with a tail to predict. The flat order of results is the predicted tokens of all rows, row
    after row. A rank may hold only some rows; it knows the lengths of the others."""

    tokens: Sequence[NDArray[np.int32]]
    """[rows] of [length] token ids; empty for rows that other ranks hold."""
    starts: NDArray[np.int64]
    """[rows] index of the first predicted token, at least 1."""
    kept: KeptSets | None = None
    """The set over which each held predicted token's distribution is renormalized; None: the whole vocabulary."""
    experts: RoutedExperts | None = None
    """[tokens of the held rows] the engine's experts to replay; None: routers choose."""
    ranks: NDArray[np.int64] | None = None
    """[rows] the data parallel rank that holds each row; None: every rank holds all rows, not yet dealt."""
    all_lengths: NDArray[np.int64] | None = None
    """[rows] the lengths of all rows, if only some are held."""

    @staticmethod
    def of_batch(batch: Batch) -> TokenRows:
        """Return every sample of `batch`, with its response to predict."""
        return TokenRows(
            tokens=batch.rows(),
            starts=batch.prompt_lengths.astype(np.int64),
            kept=batch.kept,
            experts=batch.experts,
            ranks=None if batch.share is None else batch.share.ranks,
            all_lengths=batch.lengths,
        )

    def beginnings(self, lengths: NDArray[np.int64]) -> TokenRows:
        """Return the first `lengths` [rows] tokens of each row."""
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
    """[rows] number of tokens."""
    held_lengths: NDArray[np.int64] = field(init=False)
    """[rows] number of tokens that this rank holds."""
    token_offsets: NDArray[np.int64] = field(init=False)
    """[rows + 1] where each held row begins among the tokens of all held rows."""
    offsets: NDArray[np.int64] = field(init=False)
    """[rows + 1] where each row's predicted tokens begin in the flat order."""
    kept_offsets: NDArray[np.int64] = field(init=False)
    """[rows + 1] where the sets of each held row's predicted tokens begin in `kept`."""

    def __post_init__(self) -> None:
        self.held_lengths = np.fromiter(map(len, self.tokens), np.int64, len(self.tokens))
        self.lengths = self.held_lengths if self.all_lengths is None else self.all_lengths
        self.token_offsets = offsets_of(self.held_lengths)
        self.offsets = offsets_of(np.maximum(self.lengths - self.starts, 0))
        self.kept_offsets = offsets_of(np.maximum(self.held_lengths - self.starts, 0))


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Packed rows of this context parallel rank."""

    tokens: Tensor
    """int64 [1, tokens]; padding has 0 within a row, and repeats the micro-batch's tokens in the row after the last."""
    labels: Tensor
    """int64 [1, tokens], the token that follows; 0 for padding."""
    columns: Tensor
    """int64 [predicted], where the labels are predicted (response) tokens."""
    index: Tensor
    """int64 [predicted], the places of these tokens in the flat order."""
    row_ends: Tensor
    """int32 [rows + 1], the cumulative row lengths from 0, over all context parallel ranks together. Padding after the
    last row is one more row."""
    places: NDArray[np.int64]
    """[tokens], the token's place among the tokens of all held rows; -1 for padding. Always on the host."""
    kept: KeptRows | None = None
    """The kept set of each label, empty where no token is predicted."""

    def scatter(self, flat: Tensor) -> Tensor:
        """Lay out flat values [predicted] as [1, tokens], with 0 where no token is predicted."""
        whole = flat.new_zeros(self.tokens.shape)
        whole[0].index_copy_(0, self.columns, flat.index_select(0, self.index))
        return whole

    def to(self, device: torch.device | str) -> MicroBatch:
        """Copy the micro-batch to `device` in one piece, while the host goes on."""
        kept = [] if self.kept is None else [self.kept.owner, self.kept.tokens, self.kept.counts]
        held = [self.tokens, self.labels, self.columns, self.index, self.row_ends, *kept]
        sizes = [tensor.numel() for tensor in held]
        block = to_device(torch.cat([tensor.view(-1).long() for tensor in held]), device)
        tokens, labels, columns, index, row_ends, *kept = torch.split(block, sizes)
        return MicroBatch(
            tokens=tokens[None],
            labels=labels[None],
            columns=columns,
            index=index,
            row_ends=row_ends.int(),
            places=self.places,
            kept=KeptRows(*kept) if kept else None,
        )

    @staticmethod
    def pack(rows: TokenRows, group: Sequence[int], widths: NDArray[np.int64], length: int, split: Split) -> MicroBatch:
        """Lay out the rows of `group`, padded to `widths` [rows], and a row of padding up to `length` in all."""
        padded = widths[group].tolist()
        filled = sum(padded)
        if filled < length:
            padded.append(length - filled)
        ends = offsets_of(padded)
        tokens, labels = np.zeros((2, ends[-1]), np.int64)
        places, index, sets = np.full((3, ends[-1]), -1, np.int64)
        for row, first in zip(group, ends, strict=False):
            ids, start, end = rows.tokens[row], int(rows.starts[row]), int(rows.lengths[row])
            if start < 1:
                raise ValueError(f"row {row} predicts from token {start}; the first token has nothing before it")
            tokens[first : first + end - 1] = ids[:-1]
            labels[first : first + end - 1] = ids[1:]
            places[first : first + end - 1] = rows.token_offsets[row] + np.arange(end - 1)
            if end > start:
                index[first + start - 1 : first + end - 1] = np.arange(rows.offsets[row], rows.offsets[row + 1])
                sets[first + start - 1 : first + end - 1] = np.arange(*rows.kept_offsets[row : row + 2])
        # Equal tokens would all be sent to the same experts.
        tokens[filled:] = np.resize(tokens[:filled], length - filled)
        columns = zigzag_columns(padded, split.context_ranks, split.context_rank)
        held = columns.numpy()
        predicted = np.flatnonzero(index[held] >= 0)
        row_ends = np.full(max(len(ends), split.row_slots + 1), ends[-1], np.int32)
        row_ends[: len(ends)] = ends
        return MicroBatch(
            tokens=torch.from_numpy(tokens[held])[None],
            labels=torch.from_numpy(labels[held])[None],
            columns=torch.from_numpy(predicted),
            index=torch.from_numpy(index[held][predicted]),
            row_ends=torch.from_numpy(row_ends),
            places=places[held],
            kept=None if rows.kept is None else KeptRows.of(rows.kept.take(sets[held])),
        )


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor from the host to `device`. A GPU copies from pinned memory between the kernels before and after;
    from other memory the host would wait for all of them."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One rank's micro-batches of a batch."""

    micro_batches: tuple[MicroBatch, ...]
    rows: NDArray[np.bool_]
    """[rows] True for the rows that this rank runs through the model."""
    padding_share: float
    """Padded positions ÷ all positions, over all ranks."""


@dataclass(kw_only=True)
class Split:
    """The division of a batch over ranks, and the sizes that Megatron requires of the pieces."""

    data_ranks: int = 1
    data_rank: int = 0
    context_ranks: int = 1
    context_rank: int = 0
    sequence_ranks: int = 1
    """Tensor parallel ranks that split the tokens of a context parallel rank (sequence parallelism)."""
    token_multiple: int = 1
    """Multiple of each rank's number of tokens, as FP8 products require."""
    count_multiple: int = 1
    """Multiple of the number of micro-batches."""
    preferred_multiple: int = 1
    """Multiple of each rank's number of tokens where the budget has room: a GPU's memory and caches then meet few
    lengths."""
    one_length: bool = False
    """Whether all micro-batches of a data parallel rank are as long as its longest, as pipeline stages need."""
    row_slots: int = 0
    """If above 0, all micro-batches have one shape, as CUDA graphs need: they are as long as the budget and have this
    many rows, the last of them without tokens."""
    attention_parity: int | None = None
    """See ModelConfig.attention_parity; None: balance without attention."""

    row_multiple: int = field(init=False)
    """Multiple of a padded row's length: each context parallel rank holds two pieces of it."""
    total_multiple: int = field(init=False)
    """Multiple of a micro-batch's tokens over all its rows."""

    def __post_init__(self) -> None:
        self.row_multiple = 2 * self.context_ranks if self.context_ranks > 1 else 1
        whole = self.context_ranks * self.token_multiple
        self.total_multiple = math.lcm(self.row_multiple, whole) * self.sequence_ranks


def plan_micro_batches(
    rows: TokenRows, *, micro_batch_tokens: int, split: Split, chosen: NDArray[np.bool_] | None = None
) -> Plan:
    """Partition `rows` over data parallel ranks and micro-batches of at most `micro_batch_tokens` tokens. The number of
    micro-batches is the smallest that keeps the budget, the same on all ranks. `chosen` [rows] leaves rows out; the
    flat order stays. Raises RecipeError if a single row does not fit."""
    included = np.ones(len(rows.lengths), np.bool_) if chosen is None else chosen
    # A row's positions in a micro-batch: its last token predicts nothing.
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
        most_rows = max(len(part) for parts in dealt for part in parts)
        if max(map(fullest, tokens, dealt)) <= budget and not 0 < split.row_slots <= most_rows:  # one more for padding
            break
        count += split.count_multiple
    lengths = [padded_lengths(each, parts, split, budget) for each, parts in zip(tokens, dealt, strict=True)]
    share, rank = shares[split.data_rank], split.data_rank
    micro_batches = [
        MicroBatch.pack(rows, share[part].tolist(), widths, length, split)
        for part, length in zip(dealt[rank], lengths[rank], strict=True)
    ]
    real = int(np.maximum(rows.lengths[included] - 1, 0).sum())
    return Plan(
        micro_batches=tuple(micro_batches),
        rows=included & (ranks == rank),
        padding_share=1.0 - real / sum(map(sum, lengths)),
    )


def padded_lengths(widths: Sequence[int], parts: Sequence[Sequence[int]], split: Split, budget: int) -> list[int]:
    """Return the lengths of a data parallel rank's micro-batches, each of the rows in `parts` with these `widths`."""
    if split.row_slots:
        return [budget] * len(parts)
    least = split.row_multiple  # of a micro-batch without rows
    preferred = math.lcm(split.total_multiple, split.preferred_multiple * split.context_ranks * split.sequence_ranks)
    lengths = []
    for part in parts:
        length = _rounded_up(fullest(widths, [part]) or least, split.total_multiple)
        lengths.append(max(length, min(_rounded_up(length, preferred), budget)))
    return [max(lengths)] * len(lengths) if split.one_length else lengths


def deal(lengths: NDArray[np.int64], split: Split, together: Sequence[NDArray[np.bool_]]) -> NDArray[np.int64]:
    """Return the data parallel rank that takes each row of `lengths` [rows], int64 [rows]. Each set of rows in
    `together` [rows] is dealt out evenly, because a pass may run over it alone. Rows in no set go to rank 0."""
    ranks = np.zeros(len(lengths), np.int64)
    work = _rounded_up(np.maximum(lengths - 1, 1), split.row_multiple)
    if split.attention_parity is not None:  # a rank's time, in arbitrary units
        work = work * (split.attention_parity + work)
    for rows in map(np.flatnonzero, together):
        for rank, part in enumerate(sections(work[rows].tolist(), split.data_ranks)):
            ranks[rows[part]] = rank
    return ranks


def zigzag_columns(lengths: Sequence[int], num_ranks: int, rank: int) -> Tensor:
    """Return the columns (int64) that context parallel `rank` holds of packed rows of these `lengths`. Each row is cut
    into 2 × num_ranks pieces; the rank holds pieces `rank` and 2 × num_ranks − 1 − `rank`."""
    if num_ranks == 1:
        return torch.arange(sum(lengths))
    starts = offsets_of(lengths)
    held = []
    for start, length in zip(starts, lengths, strict=False):
        pieces = (torch.arange(length) + int(start)).chunk(2 * num_ranks)
        held += [pieces[rank], pieces[2 * num_ranks - 1 - rank]]
    return torch.cat(held)


Count = TypeVar("Count", int, NDArray[np.int64])


def _rounded_up(count: Count, multiple: int) -> Count:
    return -(-count // multiple) * multiple
