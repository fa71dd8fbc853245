"""One masked call equals a loop over requests, whatever lies in the rows of the cache that are not theirs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sglang.cpu.attention import _decode, _extend
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
    # The cache holds another request's leftovers everywhere else, and the requests lie in any order.
    caches = [torch.full((64, kv_heads, size), left, dtype=torch.float64) for left in (1e6, -1e6)]
    table = torch.randperm(64, generator=generator)[: (requests + 1) * longest].view(requests + 1, longest).int()
    rows = torch.randperm(requests + 1, generator=generator)[:requests]
    for cache, right in zip(caches, (keys, values), strict=True):
        for request, length in enumerate(lengths):
            cache[table[rows[request], :length]] = right[request, :length]
    backend = SimpleNamespace(even_keel_step=None)
    for _ in range(2):  # two layers
        found = torch.empty_like(query)
        _decode(fail, backend, query, found, *caches, table, rows, torch.tensor(lengths), scaling=0.5)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def fail(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("the loop was called")


@pytest.mark.parametrize(("tokens", "loops"), [([1, 1], False), ([1, 2], True)])
def test_samples_that_begin_behind_a_cached_prompt_are_decoded(tokens: list[int], loops: bool) -> None:
    called: list[str] = []
    backend = SimpleNamespace(even_keel_step=None)
    query, cache = torch.ones(sum(tokens), 1, 4), torch.ones(8, 1, 4)
    table, lengths = torch.arange(8).view(2, 4), torch.tensor([3, 4])
    places = (query, torch.empty_like(query), cache, cache, table, torch.arange(2), lengths)
    new = torch.tensor(tokens)

    def loop(*_: Any, **__: Any) -> torch.Tensor:
        called.append("loop")
        return query

    _extend(loop, backend, *places, lengths - new, new, is_cross_attn=False, sliding_window_size=None)
    assert bool(called) == loops
