"""Causal attention over packed rows, context parallel or not: Megatron's own (non-TE) layers have neither.

    row           a a a a a a a a b b b b         two rows packed; each a multiple of 2 × ranks long
    rank 0        a a         a a b     b         a rank holds pieces r and 2·ranks − 1 − r of every row: the zig-zag
    rank 1            a a a a       b b           gives each rank the same share of every causal triangle

Keys and values are gathered over the context parallel group, queries stay where they are. Rows are spread over a padded
[rows, longest] grid for torch's attention and packed again after it, so that padding costs attention only, never a
linear layer. Transformer Engine brings kernels of its own for the same layout, and is used instead when it is there.
"""

from __future__ import annotations

import math
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
        rows = list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
        if group.size() == 1:
            context = self._attend_alone(query, key, value, rows)
        else:
            context = self._attend_gathered(query, key, value, rows, group)
        return context.flatten(1)

    def _attend_alone(self, query: Tensor, key: Tensor, value: Tensor, rows: list[tuple[int, int]]) -> Tensor:
        grid = _Grid([end - start for start, end in rows], query.device)
        found = _attention(grid.spread(query), grid.spread(key), grid.spread(value), self._scale, is_causal=True)
        return grid.pack(found)

    def _attend_gathered(
        self, query: Tensor, key: Tensor, value: Tensor, rows: list[tuple[int, int]], group: Any
    ) -> Tensor:
        ranks = group.size()
        lengths = [end - start for start, end in rows]
        # The gradient of a gathered key is the sum over the ranks whose queries looked at it: a reduce-scatter.
        key, value = (gather_from_sequence_parallel_region(tensor, group=group) for tensor in (key, value))
        held = torch.cat([zigzag_columns(lengths, ranks, rank) for rank in range(ranks)])
        in_order = torch.argsort(held).to(query.device)
        whole = _Grid(lengths, query.device)
        mine = _Grid([length // ranks for length in lengths], query.device)
        starts = torch.tensor([start for start, _ in rows]).repeat_interleave(torch.tensor(lengths) // ranks)
        position = mine.spread((zigzag_columns(lengths, ranks, group.rank()) - starts).to(query.device)[:, None])
        # [rows, 1, queries, keys]; a padded query is put at position 0, so that it has a key to look at.
        visible = torch.arange(whole.width, device=query.device) <= position[..., None, :, :1]
        found = _attention(
            mine.spread(query),
            whole.spread(key[in_order]),
            whole.spread(value[in_order]),
            self._scale,
            attn_mask=visible,
        )
        return mine.pack(found)


class _Grid:
    """Packed rows ⇄ [rows, longest], zeros where rows are shorter."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.height, self.width = len(lengths), max(lengths)
        spans = [torch.arange(length) + row * self.width for row, length in enumerate(lengths)]
        self._places = torch.cat(spans).to(device)

    def spread(self, packed: Tensor) -> Tensor:
        """[tokens, …] → [rows, longest, …]"""
        grid = packed.new_zeros(self.height * self.width, *packed.shape[1:])
        return grid.index_copy(0, self._places, packed).view(self.height, self.width, *packed.shape[1:])

    def pack(self, grid: Tensor) -> Tensor:
        """[rows, longest, …] → [tokens, …]"""
        return grid.flatten(0, 1).index_select(0, self._places)


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float, **mask: Any) -> Tensor:
    """[rows, tokens, heads, channels] each, key and value with as many heads or a divisor of them."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=grouped, **mask).transpose(1, 2)
