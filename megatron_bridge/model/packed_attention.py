"""Compute causal attention over packed rows, also context parallel, which Megatron's own (non-TE) layers lack.

    row           a a a a a a a a b b b b         two rows packed; each a multiple of 2 × ranks long
    rank 0        a a         a a b     b         a rank holds pieces r and 2·ranks − 1 − r of every row: the zig-zag
    rank 1            a a a a       b b           gives each rank the same share of every causal triangle

Keys and values are gathered over the context parallel group. Queries are placed at their positions in the rows, so that
torch's causal attention needs no mask, which would hold a number for every query and key.

Neighboring rows of similar length are spread over a padded [rows, longest] grid for torch's attention and packed again
afterwards. Padding costs only attention, never a linear layer, and is at most a third of the tokens; rows of equal
length need none and are not moved. Transformer Engine's layers use TE's own kernels for the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_bridge.step.micro_batches import to_device, zigzag_columns


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Megatron's core attention of a layer, without parameters."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config)
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedRows,
        **__: Any,
    ) -> Tensor:
        """Return [tokens, heads/tp × channels] from `query` [tokens, heads/tp, channels], `key` and `value` [tokens, kv
        heads/tp, channels], all of this context parallel rank."""
        group = parallel_state.get_context_parallel_group()
        layout = packed_seq_params.layout(group, query.device)
        if layout.order is None:
            return self._attend(query, key, value, layout).flatten(1)
        # A gathered key's gradient is the sum over the ranks whose queries used it: a reduce-scatter.
        key, value = (gather_from_sequence_parallel_region(tensor, group=group) for tensor in (key, value))
        in_place = query.new_zeros(len(layout.order), *query.shape[1:]).index_copy(0, layout.mine, query)
        found = self._attend(in_place, key[layout.order], value[layout.order], layout)
        return found.index_select(0, layout.mine).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, layout: RowLayout) -> Tensor:
        """Attend within rows, each [tokens, heads, channels]. Key and value may have fewer heads."""
        found = []
        # `split`, because the gradient of a slice is as long as the whole tensor.
        split = [torch.split(tensor, list(map(sum, layout.buckets))) for tensor in (query, key, value)]
        for bucket, places, *packed in zip(layout.buckets, layout.places, *split, strict=True):
            count, longest = len(bucket), max(bucket)
            grids = []
            for tensor in packed:
                if places is not None:
                    tensor = tensor.new_zeros(count * longest, *tensor.shape[1:]).index_copy(0, places, tensor)
                grids.append(tensor.view(count, longest, *tensor.shape[1:]).transpose(1, 2))
            queries, keys, values = grids
            each = queries.shape[1] // keys.shape[1]
            # With fewer key heads than query heads, only flash attention stores no scores on a GPU; it takes no
            # float32.
            if each > 1 and query.is_cuda and query.dtype is torch.float32:
                keys, values, each = keys.repeat_interleave(each, 1), values.repeat_interleave(each, 1), 1
            context = F.scaled_dot_product_attention(
                queries, keys, values, scale=self._scale, enable_gqa=each > 1, is_causal=True
            )
            flat = context.transpose(1, 2).flatten(0, 1)
            found.append(flat if places is None else flat.index_select(0, places))
        return torch.cat(found) if len(found) > 1 else found[0]


class RowLayout:
    """What `PackedAttention` needs to know of the rows of a micro-batch, with indices on the device."""

    buckets: list[list[int]]
    """Lengths of neighboring rows that share a grid."""
    places: list[Tensor | None]
    """int64 [tokens of a bucket], their places in the grid [rows, longest]; None where its rows are equally long."""
    mine: Tensor
    """int64 [tokens], the columns of this context parallel rank's tokens in the rows."""
    order: Tensor | None = None
    """int64 [tokens of all ranks], which of the gathered tokens stands in each column; None with one rank."""

    def __init__(self, lengths: list[int], ranks: int, rank: int, device: torch.device) -> None:
        """Compute the layout of rows of these `lengths`, over all of `ranks` context parallel ranks."""
        self.buckets = like_rows(lengths)
        indices = list[Tensor]()
        for bucket in self.buckets:
            spans = [torch.arange(length) + row * max(bucket) for row, length in enumerate(bucket)]
            indices.append(torch.cat(spans) if min(bucket) < max(bucket) else torch.arange(0))
        if ranks > 1:
            held = [zigzag_columns(lengths, ranks, each) for each in range(ranks)]
            indices += [torch.argsort(torch.cat(held)), held[rank]]
        sizes = [len(index) for index in indices]
        moved = torch.split(to_device(torch.cat(indices), device), sizes)
        self.places = [index if len(index) else None for index in moved[: len(self.buckets)]]
        if ranks > 1:
            self.order, self.mine = moved[-2:]


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """Megatron's PackedSeqParams, with a layout that all layers of a micro-batch share."""

    _layout: RowLayout | None = None

    def layout(self, group: dist.ProcessGroup, device: torch.device) -> RowLayout:
        """Return the rows' layout, made at the first call, for this rank of the context parallel `group`."""
        if self._layout is None:
            lengths = [length for length in self.cu_seqlens_q.diff().tolist() if length]
            self._layout = RowLayout(lengths, group.size(), group.rank(), device)
        return self._layout


def like_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Group consecutive rows into buckets in which no row is shorter than 3/4 of the longest."""
    buckets: list[list[int]] = []
    for length in lengths:
        together = [*buckets[-1], length] if buckets else []
        if together and 4 * min(together) >= 3 * max(together):
            buckets[-1] = together
        else:
            buckets.append([length])
    return buckets
