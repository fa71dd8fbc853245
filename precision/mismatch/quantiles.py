"""Exact quantiles of many values. torch.quantile takes no more than 16 million."""

from __future__ import annotations

import math
from collections.abc import Sequence

from precision.torch_on_use import Tensor, torch


def quantiles_of_sorted(ordered: Tensor, orders: Sequence[float]) -> Tensor:
    """float64 [orders] of the ascending values `ordered`, float64 [values]; NaN without values. `orders` lie in [0, 1].
    Between two values they are interpolated linearly, as NumPy does."""
    if not ordered.numel():
        return torch.full((len(orders),), math.nan, dtype=torch.float64, device=ordered.device)
    places = torch.tensor(orders, dtype=torch.float64, device=ordered.device) * (ordered.numel() - 1)
    below, above = ordered[places.floor().long()], ordered[places.ceil().long()]
    return below + (above - below) * (places - places.floor())
