"""Attention of all requests of a step in one call, through SGLang's own hook registry.

SGLang's only attention backend for a CPU without its kernels (`torch_native`) loops over requests in Python, in every
layer of every step: with 64 requests that loop is most of a small model's time. Here keys and values are gathered to
the longest request, what a token does not see is masked, and one scaled_dot_product_attention does the rest. Short
prompts are padded to the longest of their step; hundreds of them come after each update in async runs, where the cache
is emptied and every sample in flight is read again.

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


PADDED_PRODUCTS = 1 << 20
"""Prompts of a step are taken together up to so many pairs of tokens, padding included: 16 MB for four heads. Few long
ones lose nothing by the loop."""


def register_hooks() -> None:
    """Replace the loops. Once a process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_BACKEND}.init_forward_metadata", _begin_step, HookType.AFTER)
    HookRegistry.register(f"{_BACKEND}._run_sdpa_forward_decode", _decode, HookType.AROUND)
    HookRegistry.register(f"{_BACKEND}._run_sdpa_forward_extend", _extend, HookType.AROUND)


@dataclass(frozen=True)
class Step:
    """Where the keys and values of a step's requests lie, and which of them each new token sees."""

    slots: Tensor
    """[requests, longest] rows of the cache."""
    mask: Tensor
    """[requests, most new tokens, longest] 0 up to the token itself, -inf beyond. Not of booleans:
    scaled_dot_product_attention would convert them in every layer."""
    new: Tensor
    """[requests, most new tokens] bool: false beyond the new tokens of a request."""


def step_of(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, new_lens: Tensor | None = None) -> Step:
    """From SGLang's tables: the row of each token of each request, the requests of this step, their lengths, and how
    many of their tokens are new (None: one)."""
    new_lens = torch.ones_like(seq_lens) if new_lens is None else new_lens
    longest, most = int(seq_lens.max()), int(new_lens.max())
    order = torch.arange(most)
    own = (seq_lens - new_lens)[:, None] + order  # [requests, most] the place of each new token
    beyond = torch.arange(longest) > own[..., None]
    mask = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))
    return Step(req_to_token[req_pool_indices, :longest], mask, order < new_lens[:, None])


def _begin_step(_: None, backend: Any, *__: Any, **___: Any) -> None:
    """After the backend's own preparation of a step."""
    backend.even_keel_step = None


def step_at(backend: Any, *tables: Tensor) -> Step:
    """Of this step, from what `step_of` takes; worked out by its first layer."""
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
    """SGLang's signature. Cross attention and sliding windows go to the original."""
    if not _is_plain(encoder_lens, options):
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
    """SGLang's signature. Long prompts go to the original."""
    places = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
    if not _is_plain(encoder_lens, options) or not _is_short(extend_seq_lens, seq_lens):
        return original(backend, *places, extend_prefix_lens, extend_seq_lens, encoder_lens, **options)
    if len(query) == len(seq_lens):  # one token of each
        return _decode(original, backend, *places, **options)
    step = step_at(backend, req_to_token, req_pool_indices, seq_lens, extend_seq_lens)
    keys, values = (request_rows(cache, step.slots) for cache in (k_cache, v_cache))
    padded = query.new_zeros(*step.mask.shape[:2], *query.shape[1:])
    padded[step.new] = query
    output.copy_(attention(padded, keys, values, step.mask, options.get("scaling"))[step.new])
    return output


def _is_short(extend_seq_lens: Tensor, seq_lens: Tensor) -> bool:
    """Whether all requests, each as long as the longest, are few enough products."""
    return len(seq_lens) * int(extend_seq_lens.max()) * int(seq_lens.max()) <= PADDED_PRODUCTS


def _is_plain(encoder_lens: Tensor | None, options: dict[str, Any]) -> bool:
    return encoder_lens is None and options.get("sliding_window_size") is None


def request_rows(cache: Tensor, slots: Tensor) -> Tensor:
    """[*slots.shape, kv_heads, size] of a cache [rows, kv_heads, size]. Whole rows are copied: `cache[slots]` copies
    number by number, which takes six times as long."""
    return cache.flatten(1).index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[1:])


def attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Attention of as many new tokens for each request.

    query [requests, new, heads, size]; keys and values [requests, longest, kv_heads, size]; mask [requests, new,
    longest], added to the products. Returns [requests, new, heads, size].
    """
    requests, new, heads, size = query.shape
    kv_heads = keys.shape[2]
    shared = heads // kv_heads
    # The query heads that share a key head stand side by side: they become that head's queries.
    grouped = query.view(requests, new, kv_heads, shared, size).permute(0, 2, 3, 1, 4)
    mixed = scaled_dot_product_attention(
        grouped.reshape(requests, kv_heads, shared * new, size),
        keys.transpose(1, 2).to(query.dtype),
        values.transpose(1, 2).to(query.dtype),
        attn_mask=mask.repeat(1, shared if new > 1 else 1, 1)[:, None].to(query.dtype),
        scale=scale,
    )
    return mixed.view(requests, kv_heads, shared, new, -1).permute(0, 3, 1, 2, 4).reshape(requests, new, heads, -1)
