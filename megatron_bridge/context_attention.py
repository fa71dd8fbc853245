"""Context parallel attention for Megatron's own (non-TE) layers, which have none.

    position      0 1 | 2 3 | 4 5 | 6 7          two ranks: rank 0 holds pieces 0 and 3, rank 1 pieces 1 and 2
    rank 0        0 1             6 7            (the zig-zag gives every rank the same share of the causal triangle;
    rank 1              2 3   4 5                 Megatron cuts rotary positions the same way)

Keys and values are gathered over the context parallel group; queries stay where they are. The memory of the scores is
that of a rank's queries against the whole sequence. With Transformer Engine its own ring attention is used instead.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_bridge.batches import zigzag_positions


class GatheredAttention(DotProductAttention):  # type: ignore[misc]
    """Causal attention of this rank's queries to all ranks' keys."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # the parent refuses more than one; this class is what makes more work
        super().__init__(alone, *args, **kwargs)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002 (the mask follows from the positions)
        attn_mask_type: AttnMaskType | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> Tensor:
        """`query`, `key`, `value` [sequence/ranks, batch, heads, channels] → [sequence/ranks, batch, hidden/tp]."""
        group = parallel_state.get_context_parallel_group()
        num_ranks, length = group.size(), query.shape[0] * group.size()
        # The gradient of a gathered key is the sum over the ranks whose queries looked at it: a reduce-scatter.
        key, value = (gather_from_sequence_parallel_region(tensor, group=group) for tensor in (key, value))
        held = torch.cat([zigzag_positions(length, num_ranks, rank) for rank in range(num_ranks)]).to(query.device)
        mine = zigzag_positions(length, num_ranks, group.rank()).to(query.device)
        later = (held[None, :] > mine[:, None])[None, None]
        context: Tensor = super().forward(query, key, value, later, attn_mask_type=AttnMaskType.arbitrary, **kwargs)
        return context
