"""A step of a dense Qwen3 in float32 as its operations alone, through SGLang's own hook registry.

A CPU has no graph that records a step once and repeats it: every operation of every step goes through Python. SGLang's
layers call some 45 operations each, behind hooks for devices, formats and ways to share a layer that a CPU engine has
not; with few requests that takes most of a step. Here are the operations alone, in SGLang's order, so that every number
is the same to the last bit. Models of any other kind or format go to SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

_MODEL = "sglang.srt.models.qwen3.Qwen3Model"


def register_hooks() -> None:
    """Replace the walk through the layers. Once a process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_MODEL}.forward", _forward, HookType.AROUND)


def _forward(
    original: Callable[..., Any],
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    forward_batch: Any,
    input_embeds: Tensor | None = None,
    **options: Any,
) -> Any:
    """SGLang's signature."""
    if forward_batch.forward_mode.name in ("DECODE", "EXTEND") and input_embeds is None and is_plain(model):
        return forward(model, input_ids, positions, forward_batch)
    return original(model, input_ids, positions, forward_batch, input_embeds, **options)


def is_plain(model: Any) -> bool:
    """Whether `forward` computes what the model's own forward would; asked of the model once."""
    if not hasattr(model, "even_keel_plain"):
        try:
            model.even_keel_plain = _is_plain_model(model)
        except AttributeError:  # the layers of another release of SGLang keep their parts elsewhere
            model.even_keel_plain = False
    return bool(model.even_keel_plain)


def _is_plain_model(model: Any) -> bool:
    return (
        model.pp_group.world_size == 1
        and not model.layers_to_capture
        and all(_is_plain_layer(layer) for layer in model.layers)
        and _is_plain_norm(model.norm)
    )


def _is_plain_layer(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    rotary = attention.rotary_emb
    return (
        all(_is_plain_linear(part) for part in linears)
        and attention.num_heads == attention.total_num_heads
        and attention.attn.sliding_window_size in (None, -1)
        and type(rotary).__name__ == "RotaryEmbedding"
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size == attention.head_dim
        and type(mlp.act_fn).__name__ == "SiluAndMul"
        and all(map(_is_plain_norm, (layer.attn_boundary.norm, layer.ffn_boundary.norm)))
        and all(map(_is_plain_norm, (attention.q_norm, attention.k_norm)))
    )


def _is_plain_linear(part: Any) -> bool:
    return (
        type(part.quant_method).__name__ == "UnquantizedLinearMethod"
        and part.bias is None
        and part.weight.dtype == torch.float32
    )


def _is_plain_norm(norm: Any) -> bool:
    return (
        type(norm).__name__ == "RMSNorm"
        and norm.weight.dtype == torch.float32
        and norm.variance_size_override is None
        and norm.override_orig_dtype is None
    )


@torch.no_grad()
def forward(model: Any, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Tensor:
    """[tokens, hidden] after the last norm, for the new tokens of each request, whose keys and values go to the
    cache."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend = get_attn_backend()
    rotation = Rotation.at(positions, model.layers[0].self_attn.rotary_emb)
    hidden = model.embed_tokens(input_ids)
    for layer in model.layers:
        normed = _normed(hidden, layer.attn_boundary.norm)
        hidden = hidden + _attended(layer.self_attn, normed, rotation, forward_batch, backend)
        hidden = hidden + _fed_forward(layer.mlp, _normed(hidden, layer.ffn_boundary.norm))
    return _normed(hidden, model.norm)


@dataclass(frozen=True)
class Rotation:
    """Of a step's positions, the same in every layer."""

    cosine: Tensor
    """[tokens, 1, head size / 2]"""
    sine: Tensor
    """[tokens, 1, head size / 2]"""

    @staticmethod
    def at(positions: Tensor, rotary: Any) -> Rotation:
        cosine, sine = rotary.cos_sin_cache.index_select(0, positions.flatten()).unsqueeze(-2).chunk(2, dim=-1)
        return Rotation(cosine, sine)

    def turned(self, heads: Tensor) -> Tensor:
        """[tokens, heads, head size]. Two products, then their sum: fused, the last bit would differ."""
        first, second = heads.chunk(2, dim=-1)
        turned = torch.empty_like(heads)
        upper, lower = turned.chunk(2, dim=-1)
        torch.mul(first, self.cosine, out=upper).sub_(second * self.sine)
        torch.mul(second, self.cosine, out=lower).add_(first * self.sine)
        return turned


def _normed(values: Tensor, norm: Any) -> Tensor:
    return rms_norm(values, (norm.hidden_size,), norm.weight, norm.variance_epsilon)


def _attended(part: Any, hidden: Tensor, rotation: Rotation, batch: Any, backend: Any) -> Tensor:
    counts = [part.num_heads, part.num_kv_heads, part.num_kv_heads]
    heads = linear(hidden, part.qkv_proj.weight).view(len(hidden), -1, part.head_dim)
    query, key, value = torch.split(heads, counts, dim=1)
    query = rotation.turned(_normed(query.contiguous(), part.q_norm))
    key = rotation.turned(_normed(key.contiguous(), part.k_norm))
    place, pool = part.attn.layer_id, backend.token_to_kv_pool
    caches = (pool.get_key_buffer(place), pool.get_value_buffer(place))
    for cache, new in zip(caches, (key, value), strict=True):
        cache.index_copy_(0, batch.out_cache_loc, new)
    tables = (backend.req_to_token_pool.req_to_token, batch.req_pool_indices, batch.seq_lens)
    mixed = torch.empty_like(query)
    if batch.forward_mode.is_decode():
        backend._run_sdpa_forward_decode(query, mixed, *caches, *tables, scaling=part.attn.scaling)
    else:
        backend._run_sdpa_forward_extend(
            *(query, mixed, *caches, *tables, batch.extend_prefix_lens, batch.extend_seq_lens),
            **dict(scaling=part.attn.scaling, enable_gqa=part.num_heads != part.num_kv_heads, causal=True),
        )
    return linear(mixed.flatten(1), part.o_proj.weight)


def _fed_forward(mlp: Any, hidden: Tensor) -> Tensor:
    gate, up = linear(hidden, mlp.gate_up_proj.weight).chunk(2, dim=-1)
    return linear(silu(gate).mul_(up), mlp.down_proj.weight)
