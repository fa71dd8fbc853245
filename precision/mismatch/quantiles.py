"""Exact quantiles of many values, of one process or of several. torch.quantile takes no more than 16 million.

Between two values they are interpolated linearly, as NumPy does. The places of these two in the ascending order of all
values are known from their number. Where several ranks hold the values, each value is found by bisection: how many
values are not above a bound is a sum over ranks. Doubles and int64 have the same number of bits, so after 64 bounds at
most it is found exactly, and no rank has seen the values of another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from precision.ranks import Ranks
from precision.torch_on_use import Tensor, torch

_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


def quantiles_of_sorted(ordered: Tensor, orders: Sequence[float]) -> Tensor:
    """float64 [orders] of the ascending `ordered`, float64 [values]; NaN without values. `orders` lie in [0, 1]."""
    if not ordered.numel():
        return torch.full((len(orders),), math.nan, dtype=torch.float64, device=ordered.device)
    places = _places(orders, torch.tensor([ordered.numel()], device=ordered.device))[0]
    return _between(ordered[places.floor().long()], ordered[places.ceil().long()], places)


def quantiles_of_ranks(groups: Sequence[Tensor], orders: Sequence[float], ranks: Ranks) -> Tensor:
    """float64 [groups, orders]: those of each group's values over all ranks, to the last bit what one rank with all of
    them finds. `groups` are this rank's values, each float64 [values], ascending and finite. Collective."""
    if ranks.size == 1:
        return torch.stack([quantiles_of_sorted(ordered, orders) for ordered in groups])
    device = groups[0].device
    counts = ranks.sum(torch.tensor([ordered.numel() for ordered in groups], device=device))
    places = _places(orders, counts)
    wanted = torch.cat([places.floor(), places.ceil()], dim=1).long()
    below, above = _at([_keys(ordered) for ordered in groups], wanted, ranks).chunk(2, dim=1)
    return torch.where(counts[:, None] > 0, _between(below, above, places), math.nan)


def _places(orders: Sequence[float], counts: Tensor) -> Tensor:
    """float64 [counts, orders]: where the quantiles lie in the order of so many values, from 0; 0 without values."""
    shares = torch.tensor(orders, dtype=torch.float64, device=counts.device)
    return shares * (counts[:, None] - 1).clamp(min=0)


def _between(below: Tensor, above: Tensor, places: Tensor) -> Tensor:
    return below + (above - below) * (places - places.floor())


def _at(keys: Sequence[Tensor], wanted: Tensor, ranks: Ranks) -> Tensor:
    """float64 [groups, wanted]: the values at these places of each group's order over all ranks, in which a group
    without values counts as anything. `keys` are this rank's, ascending."""
    low, high = torch.full_like(wanted, _LOWEST), torch.full_like(wanted, _HIGHEST)
    while bool((low < high).any()):
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, rounded down, without an overflow
        not_above = torch.stack(
            [torch.searchsorted(own, bounds, right=True) for own, bounds in zip(keys, middle, strict=True)]
        )
        found = ranks.sum(not_above) > wanted
        low, high = torch.where(found, low, middle + 1), torch.where(found, middle, high)
    return _values(low)


def _keys(values: Tensor) -> Tensor:
    """int64, shaped and ordered as the float64 `values`."""
    bits = (values + 0.0).view(torch.int64)  # -0.0 becomes 0.0: they are equal, and their bits are not
    return torch.where(bits < 0, bits ^ _HIGHEST, bits)


def _values(keys: Tensor) -> Tensor:
    """What `_keys` made these of."""
    return torch.where(keys < 0, keys ^ _HIGHEST, keys).view(torch.float64)
