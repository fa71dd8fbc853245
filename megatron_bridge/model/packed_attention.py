"""Causal attention over packed rows, context parallel or not: Megatron's own (non-TE) layers have neither.

    row           a a a a a a a a b b b b         two rows packed; each a multiple of 2 × ranks long
    rank 0        a a         a a b     b         a rank holds pieces r and 2·ranks − 1 − r of every row: the zig-zag
    rank 1            a a a a       b b           gives each rank the same share of every causal triangle

Keys and values are gathered over the context parallel group. Queries are put where they stand in their rows, so that
torch's causal attention needs no mask, of which there would be a number for every query and key.

Neighboring rows of like length are spread over a padded [rows, longest] grid for torch's attention and packed again
after it. Padding costs attention only, never a linear layer, and at most a third of the tokens; rows of one length need
none and are not moved. Transformer Engine brings kernels of its own for the same layout, and is used instead when it is
there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_bridge.step.micro_batches import zigzag_columns


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Megatron's core attention: one per layer, no parameters."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config)
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams,
        **__: Any,
    ) -> Tensor:
        """`query` [tokens, heads/tp, channels], `key` and `value` [tokens, kv heads/tp, channels], all of this context
        parallel rank → [tokens, heads/tp × channels]."""
        ends = packed_seq_params.cu_seqlens_q
        group = parallel_state.get_context_parallel_group()
        # Plain numbers: what is done below depends on them, and they are on the host already.
        lengths = ends.diff().tolist()
        if group.size() == 1:
            context = self._attend_alone(query, key, value, lengths)
        else:
            context = self._attend_gathered(query, key, value, lengths, group)
        return context.flatten(1)

    def _attend_alone(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        grids = [_Grid(bucket, query.device) for bucket in like_rows(lengths)]
        tokens = [grid.tokens for grid in grids]
        # `split`, because the gradient of a slice is as long as the whole.
        queries, keys, values = (torch.split(tensor, tokens) for tensor in (query, key, value))
        found = [
            grid.pack(_causal(grid.spread(query), grid.spread(key), grid.spread(value), self._scale))
            for grid, query, key, value in zip(grids, queries, keys, values, strict=True)
        ]
        return torch.cat(found) if len(found) > 1 else found[0]

    def _attend_gathered(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], group: Any) -> Tensor:
        ranks = group.size()
        # The gradient of a gathered key is the sum over the ranks whose queries looked at it: a reduce-scatter.
        key, value = (gather_from_sequence_parallel_region(tensor, group=group) for tensor in (key, value))
        held = torch.cat([zigzag_columns(lengths, ranks, rank) for rank in range(ranks)])
        in_order = torch.argsort(held).to(query.device)
        mine = zigzag_columns(lengths, ranks, group.rank()).to(query.device)
        in_place = query.new_zeros(sum(lengths), *query.shape[1:]).index_copy(0, mine, query)
        found = self._attend_alone(in_place, key[in_order], value[in_order], lengths)
        return found.index_select(0, mine)


def like_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Rows that follow one another in buckets, no row shorter than three quarters of the longest of its bucket."""
    buckets: list[list[int]] = []
    for length in lengths:
        together = [*buckets[-1], length] if buckets else []
        if together and 4 * min(together) >= 3 * max(together):
            buckets[-1] = together
        else:
            buckets.append([length])
    return buckets


class _Grid:
    """Packed rows ⇄ [rows, longest], zeros where rows are shorter."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.tokens, self._shape = sum(lengths), (len(lengths), max(lengths))
        self._places: Tensor | None = None
        if min(lengths) < max(lengths):
            spans = [torch.arange(length) + row * max(lengths) for row, length in enumerate(lengths)]
            self._places = torch.cat(spans).to(device)

    def spread(self, packed: Tensor) -> Tensor:
        """[tokens, …] → [rows, longest, …]"""
        if self._places is not None:
            grid = packed.new_zeros(math.prod(self._shape), *packed.shape[1:])
            packed = grid.index_copy(0, self._places, packed)
        return packed.view(*self._shape, *packed.shape[1:])

    def pack(self, grid: Tensor) -> Tensor:
        """[rows, longest, …] → [tokens, …]"""
        flat = grid.flatten(0, 1)
        return flat if self._places is None else flat.index_select(0, self._places)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[rows, tokens, heads, channels] each, key and value with as many heads or a divisor of them."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    each = query.shape[1] // key.shape[1]
    if each > 1 and not _takes_groups(query):
        key, value, each = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1), 1
    found = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=each > 1, is_causal=True)
    return found.transpose(1, 2)


def _takes_groups(query: Tensor) -> bool:
    """Whether torch has a kernel for fewer keys than queries that stores no score of each query and key. On a GPU
    that is flash attention's alone, which takes no float32."""
    return not (query.is_cuda and query.dtype is torch.float32)
