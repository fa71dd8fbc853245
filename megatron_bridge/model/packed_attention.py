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
        packed_seq_params: PackedSeqParams,
        **__: Any,
    ) -> Tensor:
        """Return [tokens, heads/tp × channels] from `query` [tokens, heads/tp, channels], `key` and `value` [tokens, kv
        heads/tp, channels], all of this context parallel rank."""
        group = parallel_state.get_context_parallel_group()
        # The code below needs the lengths as plain numbers; on a GPU this waits for the device.
        lengths, ranks = packed_seq_params.cu_seqlens_q.diff().tolist(), group.size()
        if ranks == 1:
            return self._attend(query, key, value, lengths).flatten(1)
        # A gathered key's gradient is the sum over the ranks whose queries used it: a reduce-scatter.
        key, value = (gather_from_sequence_parallel_region(tensor, group=group) for tensor in (key, value))
        held = torch.cat([zigzag_columns(lengths, ranks, rank) for rank in range(ranks)])
        in_order = torch.argsort(held).to(query.device)
        mine = zigzag_columns(lengths, ranks, group.rank()).to(query.device)
        in_place = query.new_zeros(sum(lengths), *query.shape[1:]).index_copy(0, mine, query)
        return self._attend(in_place, key[in_order], value[in_order], lengths).index_select(0, mine).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        """Attend within rows of these `lengths`, each [tokens, heads, channels]. Key and value may have fewer heads."""
        buckets, found = like_rows(lengths), []
        # `split`, because the gradient of a slice is as long as the whole tensor.
        split = [torch.split(tensor, list(map(sum, buckets))) for tensor in (query, key, value)]
        for bucket, *packed in zip(buckets, *split, strict=True):
            count, longest, places = len(bucket), max(bucket), None
            if min(bucket) < longest:  # a grid [rows, longest] of the packed rows, 0 beyond a row's end
                spans = [torch.arange(length) + row * longest for row, length in enumerate(bucket)]
                places = torch.cat(spans).to(query.device)
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
