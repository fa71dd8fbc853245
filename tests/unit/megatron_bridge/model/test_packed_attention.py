"""Packed attention against one row at a time in float64, values and gradients; what it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_bridge.model.packed_attention import PackedAttention, PackedRows, like_rows
from megatron_bridge.parallel.layout import Layout, initialize
from tests.support.learners import leave_world

HEADS, KV_HEADS, CHANNELS = 4, 2, 8


def one_row(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention written out. [tokens, heads, channels] each."""
    key, value = (tensor.repeat_interleave(HEADS // KV_HEADS, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhc,khc->hqk", query, key) / CHANNELS**0.5
    later = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khc->qhc", scores.masked_fill(later, -torch.inf).softmax(-1), value).flatten(1)


@pytest.fixture
def attention() -> Iterator[PackedAttention]:
    initialize(Layout(), seed=0, deadline_s=30.0)
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=HEADS, kv_channels=CHANNELS, cuda_graph_scope=[]
    )
    yield PackedAttention(config)
    leave_world()


def inputs_of(lengths: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, CHANNELS) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def packed(lengths: Sequence[int]) -> PackedRows:
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return PackedRows(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)


@pytest.mark.parametrize("lengths", [(5, 1, 9), (9, 9, 8, 7, 3, 3, 3, 1), (6, 6)])
def test_rows_attend_to_themselves_only(attention: PackedAttention, lengths: tuple[int, ...]) -> None:
    inputs = inputs_of(lengths)
    found = attention(*inputs, None, packed_seq_params=packed(lengths))
    rows = zip(*(tensor.split(lengths) for tensor in inputs), strict=True)
    expected = torch.cat([one_row(*row) for row in rows])
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad((found * direction).sum(), inputs)
    theirs = torch.autograd.grad((expected * direction).sum(), inputs)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, atol=1e-12, rtol=0)


def test_a_long_row_among_short_ones_costs_its_own_tokens(attention: PackedAttention) -> None:
    """What is kept for the backward pass follows the tokens: neither rows × longest nor longest squared."""
    lengths = [2048, *[16] * 64]
    inputs, kept = inputs_of(lengths), dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = attention(*inputs, None, packed_seq_params=packed(lengths))
    assert sum(kept.values()) < 3 * sum(tensor.untyped_storage().nbytes() for tensor in (*inputs, found))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30))
def test_rows_of_a_bucket_are_alike(lengths: list[int]) -> None:
    buckets = like_rows(lengths)
    assert [length for bucket in buckets for length in bucket] == lengths
    assert all(len(bucket) * max(bucket) <= 4 / 3 * sum(bucket) for bucket in buckets)


def test_a_bucket_by_hand() -> None:
    assert like_rows([100, 75, 74, 60, 59, 10]) == [[100, 75], [74, 60, 59], [10]]
