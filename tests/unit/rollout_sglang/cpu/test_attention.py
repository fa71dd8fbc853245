"""One masked call equals a loop over requests, whatever lies in the slots beyond a request's length."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sglang.cpu.attention import decode_attention
from tests.support.examples import examples


def one_by_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """Softmax attention written out, request after request and head after head."""
    output = torch.empty_like(query)
    heads_per_kv = query.shape[1] // keys.shape[2]
    for request, length in enumerate(lengths):
        for head in range(query.shape[1]):
            key, value = (t[request, :length, head // heads_per_kv] for t in (keys, values))
            weights = torch.softmax(scale * key @ query[request, head], 0)
            output[request, head] = weights @ value
    return output


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    kv_heads=st.sampled_from([1, 2]),
    heads_per_kv=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(60))
def test_equals_the_loop(lengths: list[int], kv_heads: int, heads_per_kv: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    requests, longest, size = len(lengths), max(lengths), 4
    query = torch.randn(requests, kv_heads * heads_per_kv, size, generator=generator, dtype=torch.float64)
    keys, values = (
        torch.randn(requests, longest, kv_heads, size, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    expected = one_by_one(query, keys, values, lengths, 0.5)
    for request, length in enumerate(lengths):  # another request's leftovers
        keys[request, length:] = 1e6
        values[request, length:] = -1e6
    found = decode_attention(query, keys, values, torch.tensor(lengths), 0.5)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
