"""The processes that share the work on one step, as far as mathematics has to know of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from precision.torch_on_use import Tensor


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """One of `size` processes that call the same functions in the same order."""

    rank: int
    """Which of them this is, from 0."""
    size: int
    sum: Callable[[Tensor], Tensor]
    """Adds a tensor, float64 or int64, over all of them, and may overwrite it. All get the same, bit for bit."""


ALONE = Ranks(rank=0, size=1, sum=lambda tensor: tensor)
"""One process has all the work."""
