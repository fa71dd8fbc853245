"""A step without SGLang's layers is the same to the last bit as their operations one by one, and is left to them where
a model is of another kind."""

from __future__ import annotations

import sys
from enum import IntEnum
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout_sglang.cpu import forward
from rollout_sglang.cpu.forward import _decode, _extend, attention, request_rows, step_of

HIDDEN, FFN, HEADS, KV_HEADS, SIZE, EPS = 24, 40, 4, 2, 8, 1e-6


class Mode(IntEnum):
    """Three of SGLang's."""

    EXTEND = 1
    DECODE = 2
    TARGET_VERIFY = 5

    def is_decode(self) -> bool:
        return self is Mode.DECODE


class UnquantizedLinearMethod:
    """SGLang's name."""


class RMSNorm:
    """SGLang's name, and what it computes (layers/layernorm.py, forward_native)."""

    variance_size_override = override_orig_dtype = None

    def __init__(self, size: int) -> None:
        self.weight, self.hidden_size, self.variance_epsilon = torch.randn(size), size, EPS

    def __call__(self, values: Tensor) -> Tensor:
        return values * torch.rsqrt(values.pow(2).mean(dim=-1, keepdim=True) + EPS) * self.weight


class RotaryEmbedding:
    """SGLang's name, and what it computes (layers/rotary_embedding/utils.py, apply_rotary_emb)."""

    is_neox_style, rotary_dim, head_size = True, SIZE, SIZE

    def __init__(self) -> None:
        angles = torch.rand(32, SIZE // 2) * 6
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1)

    def __call__(self, positions: Tensor, heads: Tensor) -> Tensor:
        cosine, sine = self.cos_sin_cache[positions].unsqueeze(-2).chunk(2, dim=-1)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class SiluAndMul:
    """SGLang's name."""


def linear_of(rows: int, columns: int) -> SimpleNamespace:
    weight = torch.randn(rows, columns) / columns**0.5
    return SimpleNamespace(weight=weight, bias=None, quant_method=UnquantizedLinearMethod())


def layer_of(place: int, rotary: RotaryEmbedding) -> SimpleNamespace:
    return SimpleNamespace(
        attn_boundary=SimpleNamespace(norm=RMSNorm(HIDDEN)),
        ffn_boundary=SimpleNamespace(norm=RMSNorm(HIDDEN)),
        self_attn=SimpleNamespace(
            qkv_proj=linear_of((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN),
            o_proj=linear_of(HIDDEN, HEADS * SIZE),
            q_norm=RMSNorm(SIZE),
            k_norm=RMSNorm(SIZE),
            rotary_emb=rotary,
            attn=SimpleNamespace(layer_id=place, scaling=SIZE**-0.5, sliding_window_size=-1),
            **dict(num_heads=HEADS, total_num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=SIZE),
        ),
        mlp=SimpleNamespace(
            gate_up_proj=linear_of(2 * FFN, HIDDEN), down_proj=linear_of(HIDDEN, FFN), act_fn=SiluAndMul()
        ),
    )


@pytest.fixture
def model() -> SimpleNamespace:
    torch.manual_seed(0)
    rotary = RotaryEmbedding()
    return SimpleNamespace(
        embed_tokens=torch.nn.Embedding(11, HIDDEN),
        layers=[layer_of(place, rotary) for place in range(2)],
        norm=RMSNorm(HIDDEN),
        pp_group=SimpleNamespace(world_size=1),
        layers_to_capture=[],
    )


def backend_of(caches: list[tuple[Tensor, Tensor]], table: Tensor) -> SimpleNamespace:
    backend = SimpleNamespace(
        even_keel_step=None,
        token_to_kv_pool=SimpleNamespace(
            get_key_buffer=lambda place: caches[place][0], get_value_buffer=lambda place: caches[place][1]
        ),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
    )
    backend._run_sdpa_forward_decode = partial(_decode, refused, backend)
    backend._run_sdpa_forward_extend = partial(_extend, refused, backend)
    return backend


def one_by_one(model: Any, tokens: Tensor, batch: Any, caches: list[tuple[Tensor, Tensor]], table: Tensor) -> Tensor:
    """The model's operations in SGLang's order."""
    hidden = model.embed_tokens(tokens)
    step = step_of(table, batch.req_pool_indices, batch.seq_lens, batch.extend_seq_lens)
    for layer, cache in zip(model.layers, caches, strict=True):
        part, residual = layer.self_attn, hidden
        qkv = layer.attn_boundary.norm(hidden) @ part.qkv_proj.weight.T
        query, key, value = qkv.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], dim=-1)
        query = part.rotary_emb(batch.positions, part.q_norm(query.reshape(-1, HEADS, SIZE)))
        key = part.rotary_emb(batch.positions, part.k_norm(key.reshape(-1, KV_HEADS, SIZE)))
        for kept, new in zip(cache, (key, value.reshape(-1, KV_HEADS, SIZE)), strict=True):
            kept[batch.out_cache_loc] = new
        keys, values = (request_rows(kept, step.slots) for kept in cache)
        padded = torch.zeros(*step.new.shape, HEADS, SIZE)
        padded[step.new] = query
        mixed = attention(padded, keys, values, step.mask, SIZE**-0.5)[step.new]
        hidden = mixed.flatten(1) @ part.o_proj.weight.T + residual
        gate, up = (layer.ffn_boundary.norm(hidden) @ layer.mlp.gate_up_proj.weight.T).split(FFN, dim=-1)
        hidden = (torch.nn.functional.silu(gate) * up) @ layer.mlp.down_proj.weight.T + hidden
    final: Tensor = model.norm(hidden)
    return final


@pytest.mark.parametrize(
    ("lengths", "new"), [([5], None), ([3, 7, 1], None), ([3, 7], [1, 1]), ([5, 4], [5, 2]), ([6, 3, 4], [1, 3, 1])]
)
@torch.no_grad()
def test_the_last_bit_is_that_of_the_operations_one_by_one(
    model: SimpleNamespace, lengths: list[int], new: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = torch.randperm(40).view(4, 10)
    rows, seq_lens = torch.arange(len(lengths)) + 1, torch.tensor(lengths)
    counts = torch.tensor(new or [1] * len(lengths))
    ends = zip(lengths, counts.tolist(), strict=True)
    positions = torch.cat([torch.arange(length - count, length) for length, count in ends])
    batch = SimpleNamespace(
        req_pool_indices=rows,
        seq_lens=seq_lens,
        extend_prefix_lens=seq_lens - counts,
        extend_seq_lens=counts,
        out_cache_loc=table[rows.repeat_interleave(counts), positions],
        forward_mode=Mode.EXTEND if new else Mode.DECODE,
        positions=positions,  # of the expectation
    )
    caches = [(torch.randn(40, KV_HEADS, SIZE), torch.randn(40, KV_HEADS, SIZE)) for _ in model.layers]
    copies = [(key.clone(), value.clone()) for key, value in caches]
    tokens = torch.randint(0, 11, (len(positions),))
    context = ModuleType("sglang.srt.model_executor.forward_context")
    context.get_attn_backend = lambda: backend_of(caches, table)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, context.__name__, context)
    found = forward._forward(refused, model, tokens, positions, batch)
    assert torch.equal(found, one_by_one(model, tokens, batch, copies, table))
    for mine, theirs in zip(caches, copies, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


def refused(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("left to SGLang")


def quantized(model: Any) -> None:
    model.layers[1].mlp.down_proj.quant_method = object()


def with_bias(model: Any) -> None:
    model.layers[0].self_attn.qkv_proj.bias = torch.zeros(1)


def in_bfloat16(model: Any) -> None:
    model.layers[0].mlp.gate_up_proj.weight = model.layers[0].mlp.gate_up_proj.weight.bfloat16()


def sharded(model: Any) -> None:
    model.layers[0].self_attn.total_num_heads *= 2


def staged(model: Any) -> None:
    model.pp_group.world_size = 2


def captured(model: Any) -> None:
    model.layers_to_capture = [1]


def windowed(model: Any) -> None:
    model.layers[0].self_attn.attn.sliding_window_size = 4


def turned_in_pairs(model: Any) -> None:
    model.layers[0].self_attn.rotary_emb.is_neox_style = False


def of_another_release(model: Any) -> None:
    del model.layers[0].attn_boundary


@pytest.mark.parametrize(
    "other",
    [quantized, with_bias, in_bfloat16, sharded, staged, captured, windowed, turned_in_pairs, of_another_release],
)
def test_other_models_are_left_to_sglang(model: SimpleNamespace, other: Any) -> None:
    assert forward.is_plain(model)
    del model.even_keel_plain
    other(model)
    batch = SimpleNamespace(forward_mode=Mode.DECODE)
    assert forward._forward(lambda *_, **__: "SGLang's", model, None, None, batch) == "SGLang's"  # type: ignore[arg-type]


def test_steps_of_other_kinds_are_left_to_sglang(model: SimpleNamespace) -> None:
    batch = SimpleNamespace(forward_mode=Mode.TARGET_VERIFY)
    assert forward._forward(lambda *_, **__: "SGLang's", model, None, None, batch) == "SGLang's"  # type: ignore[arg-type]
