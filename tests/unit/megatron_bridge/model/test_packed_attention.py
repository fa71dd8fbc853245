"""Packed attention against one row at a time in float64, values and gradients."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_bridge.model.packed_attention import PackedAttention
from megatron_bridge.parallel.layout import Layout, initialize
from tests.support.world import leave_world

HEADS, KV_HEADS, CHANNELS = 4, 2, 8
LENGTHS = (5, 1, 9)


def one_row(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention written out. [tokens, heads, channels] each."""
    key, value = (tensor.repeat_interleave(HEADS // KV_HEADS, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhc,khc->hqk", query, key) / CHANNELS**0.5
    later = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khc->qhc", scores.masked_fill(later, -torch.inf).softmax(-1), value).flatten(1)


def test_rows_attend_to_themselves_only() -> None:
    initialize(Layout(), seed=0, deadline_s=30.0)
    try:
        config = TransformerConfig(
            num_layers=1, hidden_size=32, num_attention_heads=HEADS, kv_channels=CHANNELS, cuda_graph_scope=[]
        )
        attention = PackedAttention(config)
        generator = torch.Generator().manual_seed(0)
        shapes = [(sum(LENGTHS), heads, CHANNELS) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
        for tensor in inputs:
            tensor.requires_grad_()
        ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        found = attention(*inputs, None, packed_seq_params=packed)
        assert parallel_state.get_context_parallel_world_size() == 1
    finally:
        leave_world()
    rows = zip(*(tensor.split(LENGTHS) for tensor in inputs), strict=True)
    expected = torch.cat([one_row(*row) for row in rows])
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    direction = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad((found * direction).sum(), inputs)
    theirs = torch.autograd.grad((expected * direction).sum(), inputs)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, atol=1e-12, rtol=0)
