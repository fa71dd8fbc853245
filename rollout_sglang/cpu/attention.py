"""Decoding attention of all running requests in one call, through SGLang's own hook registry.

SGLang's only attention backend for a CPU without its kernels (`torch_native`) loops over requests in Python, in every
layer of every step: with 64 requests that loop is most of a small model's time. Here keys and values are gathered to
the longest request, what lies beyond a request's own length is masked, and one scaled_dot_product_attention does the
rest. Samples of a prompt that is in the cache begin by one token each: that is the same calculation.

Which keys are gathered and which are masked is the same in every layer, so it is worked out once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def register_hooks() -> None:
    """Replace the loops. Once a process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_BACKEND}.init_forward_metadata", _begin_step, HookType.AFTER)
    HookRegistry.register(f"{_BACKEND}._run_sdpa_forward_decode", _decode, HookType.AROUND)
    HookRegistry.register(f"{_BACKEND}._run_sdpa_forward_extend", _extend, HookType.AROUND)


@dataclass(frozen=True)
class Step:
    """Where the keys and values of a step's requests lie."""

    slots: Tensor
    """[requests, longest] rows of the cache."""
    mask: Tensor
    """[requests, longest] 0 where a position counts, -inf beyond the end of its request. Not of booleans:
    scaled_dot_product_attention would convert them in every layer."""


def step_of(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor) -> Step:
    """From SGLang's tables: the row of each token of each request, the requests of this step, their lengths."""
    longest = int(seq_lens.max())
    beyond = torch.arange(longest, device=seq_lens.device) >= seq_lens[:, None]
    mask = torch.zeros(beyond.shape, device=seq_lens.device).masked_fill_(beyond, float("-inf"))
    return Step(req_to_token[req_pool_indices, :longest], mask)


def _begin_step(_: None, backend: Any, *__: Any, **___: Any) -> None:
    """After the backend's own preparation of a step."""
    backend.even_keel_step = None


def step_at(backend: Any, req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor) -> Step:
    """Of this step; worked out by its first layer."""
    if backend.even_keel_step is None:
        backend.even_keel_step = step_of(req_to_token, req_pool_indices, seq_lens)
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
    """SGLang's signature. Cross attention and sliding windows go to the original."""
    if not _is_plain(encoder_lens, options):
        arguments = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens)
        return original(backend, *arguments, **options)
    step = step_at(backend, req_to_token, req_pool_indices, seq_lens)
    keys, values = (request_rows(cache, step.slots) for cache in (k_cache, v_cache))
    output.copy_(decode_attention(query, keys, values, step.mask, options.get("scaling")))
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
    """SGLang's signature. Prompts go to the original."""
    places = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
    if len(query) == len(seq_lens) and _is_plain(encoder_lens, options):  # one token of each
        return _decode(original, backend, *places, **options)
    return original(backend, *places, extend_prefix_lens, extend_seq_lens, encoder_lens, **options)


def _is_plain(encoder_lens: Tensor | None, options: dict[str, Any]) -> bool:
    return encoder_lens is None and options.get("sliding_window_size") is None


def request_rows(cache: Tensor, slots: Tensor) -> Tensor:
    """[*slots.shape, kv_heads, size] of a cache [rows, kv_heads, size]. Whole rows are copied: `cache[slots]` copies
    number by number, which takes six times as long."""
    return cache.flatten(1).index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[1:])


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """One new token's attention for each request.

    query [requests, heads, size]; keys and values [requests, longest, kv_heads, size]; mask [requests, longest], added
    to the products. Returns [requests, heads, size].
    """
    requests, heads, size = query.shape
    kv_heads = keys.shape[2]
    # The query heads that share a key head stand side by side: they become that head's queries.
    grouped = query.view(requests, kv_heads, heads // kv_heads, size)
    mixed = scaled_dot_product_attention(
        grouped,
        keys.transpose(1, 2).to(query.dtype),
        values.transpose(1, 2).to(query.dtype),
        attn_mask=mask[:, None, None, :].to(query.dtype),
        scale=scale,
    )
    return mixed.reshape(requests, heads, -1)
