"""Compute a step of a CPU engine in few operations, through SGLang's own hook registry.

SGLang's only attention backend for a CPU without its kernels (`torch_native`) loops over requests in Python, in every
layer of every step: with 64 requests the loop takes most of a small model's time. Here keys and values are gathered to
the longest request, keys that a token does not see are masked, and one scaled_dot_product_attention does the rest.
Short prompts are padded to the longest of their step: hundreds of them come after each update in async runs, when the
cache is emptied and every sample in flight is prefilled again. The gathered and masked keys are the same in every
layer, and computed once a step.

A dense Qwen3 in float32 runs as bare operations. A CPU has no graph that records and repeats a step: every operation
goes through Python. SGLang's layers call some 45 operations each, behind hooks for devices, formats and parallelism
that a CPU engine does not have; with few requests that takes most of a step. `forward` runs the same operations in
SGLang's order, so that every number is equal to the last bit. All other models and formats go to SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


PADDED_PRODUCTS = 1 << 20
"""Limit of token pairs, padding included, up to which the prompts of a step are computed together: 16 MB for four
heads. A few long prompts lose nothing by the loop."""


def register_hooks() -> None:
    """Replace the loops over requests and the pass through the layers. Call once per process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_BACKEND}.init_forward_metadata", _begin_step, HookType.AFTER)
    HookRegistry.register(f"{_BACKEND}._run_sdpa_forward_decode", _decode, HookType.AROUND)
    HookRegistry.register(f"{_BACKEND}._run_sdpa_forward_extend", _extend, HookType.AROUND)
    HookRegistry.register("sglang.srt.models.qwen3.Qwen3Model.forward", _forward, HookType.AROUND)


@dataclass(frozen=True)
class Step:
    """The places of the keys and values of a step's requests, and the mask of each new token."""

    slots: Tensor
    """[requests, longest] rows of the cache."""
    mask: Tensor
    """[requests, most new tokens, longest] 0 up to the token itself, -inf beyond. A bool mask would be converted by
    scaled_dot_product_attention in every layer."""
    new: Tensor
    """[requests, most new tokens] bool: false beyond the new tokens of a request."""


def step_of(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, new_lens: Tensor | None = None) -> Step:
    """Build a step from SGLang's tables: the cache row of each token of each request, the requests of this step, their
    lengths, and the numbers of their new tokens (None: one each)."""
    new_lens = torch.ones_like(seq_lens) if new_lens is None else new_lens
    longest, most = int(seq_lens.max()), int(new_lens.max())
    order = torch.arange(most)
    own = (seq_lens - new_lens)[:, None] + order  # [requests, most] the position of each new token
    beyond = torch.arange(longest) > own[..., None]
    mask = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))
    return Step(req_to_token[req_pool_indices, :longest], mask, order < new_lens[:, None])


def _begin_step(_: None, backend: Any, *__: Any, **___: Any) -> None:
    """Reset the step, after the backend's own preparation."""
    backend.even_keel_step = None


def step_at(backend: Any, *tables: Tensor) -> Step:
    """Return the current step, built in its first layer from the arguments of `step_of`."""
    if backend.even_keel_step is None:
        backend.even_keel_step = step_of(*tables)
    step: Step = backend.even_keel_step
    return step


def _decode(
    original: Callable[..., Tensor],
    backend: Any,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    encoder_lens: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Replace SGLang's method, with its signature. Cross attention and sliding windows go to the original."""
    if encoder_lens is not None or options.get("sliding_window_size") is not None:
        arguments = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens)
        return original(backend, *arguments, **options)
    step = step_at(backend, req_to_token, req_pool_indices, seq_lens)
    keys, values = (request_rows(cache, step.slots) for cache in (k_cache, v_cache))
    output.copy_(attention(query[:, None], keys, values, step.mask, options.get("scaling"))[:, 0])
    return output


def _extend(
    original: Callable[..., Tensor],
    backend: Any,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    encoder_lens: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Replace SGLang's method, with its signature. Long prompts go to the original."""
    places = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
    # Products when every request is padded to the longest.
    products = len(seq_lens) * int(extend_seq_lens.max()) * int(seq_lens.max())
    if encoder_lens is not None or options.get("sliding_window_size") is not None or products > PADDED_PRODUCTS:
        return original(backend, *places, extend_prefix_lens, extend_seq_lens, encoder_lens, **options)
    if len(query) == len(seq_lens):  # one new token per request
        return _decode(original, backend, *places, **options)
    step = step_at(backend, req_to_token, req_pool_indices, seq_lens, extend_seq_lens)
    keys, values = (request_rows(cache, step.slots) for cache in (k_cache, v_cache))
    padded = query.new_zeros(*step.mask.shape[:2], *query.shape[1:])
    padded[step.new] = query
    output.copy_(attention(padded, keys, values, step.mask, options.get("scaling"))[step.new])
    return output


def request_rows(cache: Tensor, slots: Tensor) -> Tensor:
    """Return [*slots.shape, kv_heads, size] of a cache [rows, kv_heads, size]. Copies whole rows: `cache[slots]` copies
    number by number, which takes six times as long."""
    return cache.flatten(1).index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[1:])


def attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Compute attention of equally many new tokens for each request: query [requests, new, heads, size], keys and
    values [requests, longest, kv_heads, size], mask [requests, new, longest] added to the products → as query."""
    requests, new, heads, size = query.shape
    kv_heads = keys.shape[2]
    shared = heads // kv_heads
    # Query heads that share a key head are adjacent: they become the queries of that head.
    grouped = query.view(requests, new, kv_heads, shared, size).permute(0, 2, 3, 1, 4)
    mixed = scaled_dot_product_attention(
        grouped.reshape(requests, kv_heads, shared * new, size),
        keys.transpose(1, 2).to(query.dtype),
        values.transpose(1, 2).to(query.dtype),
        attn_mask=mask.repeat(1, shared if new > 1 else 1, 1)[:, None].to(query.dtype),
        scale=scale,
    )
    return mixed.view(requests, kv_heads, shared, new, -1).permute(0, 3, 1, 2, 4).reshape(requests, new, heads, -1)


def _forward(
    original: Callable[..., Any],
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    forward_batch: Any,
    input_embeds: Tensor | None = None,
    **options: Any,
) -> Any:
    if forward_batch.forward_mode.name in ("DECODE", "EXTEND") and input_embeds is None and is_plain(model):
        return forward(model, input_ids, positions, forward_batch)
    return original(model, input_ids, positions, forward_batch, input_embeds, **options)


def is_plain(model: Any) -> bool:
    """Return whether `forward` computes the same as the model's own forward; checked once per model."""
    if not hasattr(model, "even_keel_plain"):
        try:
            linears: list[Any] = []
            norms: list[Any] = [model.norm]
            rest = model.pp_group.world_size == 1 and not model.layers_to_capture
            for layer in model.layers:
                attention, mlp = layer.self_attn, layer.mlp
                rotary = attention.rotary_emb
                linears += [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
                norms += [layer.attn_boundary.norm, layer.ffn_boundary.norm, attention.q_norm, attention.k_norm]
                rest = (
                    rest
                    and attention.num_heads == attention.total_num_heads
                    and attention.attn.sliding_window_size in (None, -1)
                    and type(rotary).__name__ == "RotaryEmbedding"
                    and rotary.is_neox_style
                    and rotary.rotary_dim == rotary.head_size == attention.head_dim
                    and type(mlp.act_fn).__name__ == "SiluAndMul"
                )
            model.even_keel_plain = bool(
                rest
                and all(
                    type(part.quant_method).__name__ == "UnquantizedLinearMethod"
                    and part.bias is None
                    and part.weight.dtype == torch.float32
                    for part in linears
                )
                and all(
                    type(norm).__name__ == "RMSNorm"
                    and norm.weight.dtype == torch.float32
                    and norm.variance_size_override is None
                    and norm.override_orig_dtype is None
                    for norm in norms
                )
            )
        except AttributeError:  # another release of SGLang keeps the layers' parts elsewhere
            model.even_keel_plain = False
    return bool(model.even_keel_plain)


@torch.no_grad()
def forward(model: Any, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Tensor:
    """Return [tokens, hidden] after the last norm, for each request's new tokens, and cache their keys and values."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend = get_attn_backend()
    rotary = model.layers[0].self_attn.rotary_emb
    # [tokens, 1, head size / 2] at the step's positions, the same in every layer.
    cosine, sine = rotary.cos_sin_cache.index_select(0, positions.flatten()).unsqueeze(-2).chunk(2, dim=-1)
    hidden = model.embed_tokens(input_ids)
    for layer in model.layers:
        normed = _normed(hidden, layer.attn_boundary.norm)
        part = layer.self_attn
        counts = [part.num_heads, part.num_kv_heads, part.num_kv_heads]
        heads = linear(normed, part.qkv_proj.weight).view(len(normed), -1, part.head_dim)
        query, key, value = torch.split(heads, counts, dim=1)
        query = _turned(_normed(query.contiguous(), part.q_norm), cosine, sine)
        key = _turned(_normed(key.contiguous(), part.k_norm), cosine, sine)
        place, pool = part.attn.layer_id, backend.token_to_kv_pool
        caches = (pool.get_key_buffer(place), pool.get_value_buffer(place))
        for cache, new in zip(caches, (key, value), strict=True):
            cache.index_copy_(0, forward_batch.out_cache_loc, new)
        tables = (backend.req_to_token_pool.req_to_token, forward_batch.req_pool_indices, forward_batch.seq_lens)
        mixed = torch.empty_like(query)
        if forward_batch.forward_mode.is_decode():
            backend._run_sdpa_forward_decode(query, mixed, *caches, *tables, scaling=part.attn.scaling)
        else:
            backend._run_sdpa_forward_extend(
                *(query, mixed, *caches, *tables, forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens),
                **dict(scaling=part.attn.scaling, enable_gqa=part.num_heads != part.num_kv_heads, causal=True),
            )
        hidden = hidden + linear(mixed.flatten(1), part.o_proj.weight)
        gate, up = linear(_normed(hidden, layer.ffn_boundary.norm), layer.mlp.gate_up_proj.weight).chunk(2, dim=-1)
        hidden = hidden + linear(silu(gate).mul_(up), layer.mlp.down_proj.weight)
    return _normed(hidden, model.norm)


def _turned(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate [tokens, heads, head size]. Two products, then their sum: fused, the last bit would differ."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.empty_like(heads)
    upper, lower = turned.chunk(2, dim=-1)
    torch.mul(first, cosine, out=upper).sub_(second * sine)
    torch.mul(second, cosine, out=lower).add_(first * sine)
    return turned


def _normed(values: Tensor, norm: Any) -> Tensor:
    return rms_norm(values, (norm.hidden_size,), norm.weight, norm.variance_epsilon)
