"""One masked call equals a loop over requests, whatever lies in the rows of the cache that are not theirs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sglang.cpu.forward import _decode, _extend
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


@given(
    new=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    before=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    kv_heads=st.sampled_from([1, 2]),
    heads_per_kv=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(60))
def test_each_token_of_short_prompts_sees_those_up_to_itself(
    new: list[int], before: list[int], kv_heads: int, heads_per_kv: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    requests, counts = len(new), torch.tensor(new)
    lengths = counts + torch.tensor(before[:requests])
    table = torch.randperm(60, generator=generator).view(6, 10)
    rows = torch.randperm(6, generator=generator)[:requests]
    caches = [torch.randn(60, kv_heads, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    query = torch.randn(sum(new), kv_heads * heads_per_kv, 4, generator=generator, dtype=torch.float64)
    expected = torch.empty_like(query)
    token = 0
    for row, length, count in zip(rows, lengths, new, strict=True):
        for seen in range(int(length) - count + 1, int(length) + 1):
            keys, values = (cache[table[row, :seen]][None] for cache in caches)
            expected[token] = one_by_one(query[token][None], keys, values, [seen], 0.5)[0]
            token += 1
    backend = SimpleNamespace(even_keel_step=None)
    for _ in range(2):  # two layers
        found = torch.empty_like(query)
        tables = (table, rows, lengths, lengths - counts, counts)
        _extend(fail, backend, query, found, *caches, *tables, scaling=0.5, is_cross_attn=False)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "other", [dict(sliding_window_size=4), dict(new=(1, 1500)), dict(encoder_lens=torch.tensor([1, 1]))]
)
def test_what_one_call_would_not_do_better_is_left_to_the_loop(other: dict[str, Any]) -> None:
    """1,500 tokens of one request, and a sample beside it: padded they would be two times 1,500 × 1,500 products."""
    options = dict(new=(2, 3), encoder_lens=None, sliding_window_size=None) | other
    new = torch.tensor(options.pop("new"))
    query = torch.ones(int(new.sum()), 1, 4)
    backend, called = SimpleNamespace(even_keel_step=None), torch.zeros(())
    places = (query, torch.empty_like(query), query, query, torch.zeros(2, 1500, dtype=torch.long), torch.arange(2))
    assert _extend(lambda *_, **__: called, backend, *places, new, torch.zeros(2), new, **options) is called
