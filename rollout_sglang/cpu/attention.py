"""Decoding attention of all running requests in one call, through SGLang's own hook registry.

SGLang's only attention backend for a CPU without its kernels (`torch_native`) loops over requests in Python, in every
layer of every step: with 64 requests that loop is most of a small model's time. Here keys and values are gathered to
the longest request, what lies beyond a request's own length is masked, and one scaled_dot_product_attention does the
rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_DECODE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode"


def register_hooks() -> None:
    """Replace the loop. Once a process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_DECODE, _decode, HookType.AROUND)


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
    arguments = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens)
    if encoder_lens is not None or options.get("sliding_window_size") is not None:
        return original(backend, *arguments, **options)
    slots = req_to_token[req_pool_indices, : int(seq_lens.max())]
    output.copy_(decode_attention(query, k_cache[slots], v_cache[slots], seq_lens, options.get("scaling")))
    return output


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float | None) -> Tensor:
    """One new token's attention for each request.

    query [requests, heads, size]; keys and values [requests, longest, kv_heads, size], of which the first
    `lengths` [requests] positions count. Returns [requests, heads, size].
    """
    requests, heads, size = query.shape
    kv_heads = keys.shape[2]
    # The query heads that share a key head stand side by side: they become that head's queries.
    grouped = query.view(requests, kv_heads, heads // kv_heads, size)
    counts = torch.arange(keys.shape[1], device=lengths.device) < lengths[:, None]
    mixed = scaled_dot_product_attention(
        grouped,
        keys.transpose(1, 2).to(query.dtype),
        values.transpose(1, 2).to(query.dtype),
        attn_mask=counts[:, None, None, :],
        scale=scale,
    )
    return mixed.reshape(requests, heads, -1)
