"""Quantiles of values that several ranks hold are those of all values, to the last bit."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from precision.mismatch.quantiles import quantiles_of_ranks, quantiles_of_sorted
from precision.ranks import ALONE, Ranks
from tests.support.threads_as_ranks import on_ranks

ORDERS = (0.0, 0.001, 0.5, 0.99, 1.0)
NUMBERS = st.one_of(
    st.floats(-40.0, 40.0),
    st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 1.7976931348623157e308, -1.7976931348623157e308]),
)


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 2)), max_size=30))
def test_ranks_find_the_quantiles_of_all(values: list[tuple[float, int]]) -> None:
    def held(rank: int | None) -> torch.Tensor:
        return torch.tensor([x for x, owner in values if rank in (None, owner)], dtype=torch.float64).sort().values

    groups = [held(None), held(None).abs().sort().values]
    expected = quantiles_of_ranks(groups, ORDERS, ALONE)

    def quantiles(ranks: Ranks) -> torch.Tensor:
        mine = held(ranks.rank)
        return quantiles_of_ranks([mine, mine.abs().sort().values], ORDERS, ranks)

    for found in on_ranks(3, quantiles):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


def test_one_rank_interpolates_as_numpy_does() -> None:
    values = np.sort(np.random.default_rng(0).normal(size=1001))
    found = quantiles_of_sorted(torch.from_numpy(values), ORDERS)
    np.testing.assert_allclose(found.numpy(), np.quantile(values, ORDERS), rtol=1e-12)
    assert quantiles_of_sorted(torch.zeros(0, dtype=torch.float64), ORDERS).isnan().all()
