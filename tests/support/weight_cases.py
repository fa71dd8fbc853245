"""Weights that are hard to round to e4m3, made the same in the test and in its worker."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def grid_and_ties() -> Tensor:
    """[rows, 128] every e4m3 value, every middle between two, and the float32 values on either side of each middle.

    A row of 448 in front makes every scale 1, so that these are what is rounded.
    """
    values = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    grid = values[values.isfinite()].sort().values
    ties = (grid[1:] + grid[:-1]) / 2
    beside = [ties.nextafter(torch.full_like(ties, limit)) for limit in (math.inf, -math.inf)]
    signed_zeros = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38])
    everything = torch.cat([grid, ties, *beside, signed_zeros])
    filled = torch.cat([everything, everything.new_zeros(-len(everything) % 128)])
    return torch.cat([torch.full((1, 128), 448.0), filled.view(-1, 128)])


def gaussian(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


def steep(rows: int, columns: int) -> Tensor:
    """Columns of very different size: most of a block ends up among e4m3's subnormals and zeros."""
    return gaussian(rows, columns) * torch.logspace(-9, 2, columns)


def _with_spike() -> Tensor:
    weight = gaussian(128, 256) * 0.02
    weight[5, 7] = -3e4
    return weight


WEIGHTS: dict[str, Callable[[], Tensor]] = {
    "grid_and_ties": grid_and_ties,
    "gaussian_bfloat16": lambda: gaussian(256, 128).bfloat16(),
    "gaussian_float16": lambda: gaussian(256, 128).half(),
    "gaussian_float32": lambda: gaussian(256, 128),
    "steep": lambda: steep(128, 384),
    "steep_bfloat16": lambda: steep(128, 384).bfloat16(),
    "ragged": lambda: gaussian(130, 257).bfloat16(),
    "one_row": lambda: gaussian(1, 300),
    "one_column": lambda: gaussian(300, 1),
    "one_number": lambda: gaussian(1, 1),
    "spike": _with_spike,
    "zeros": lambda: torch.zeros(130, 5).bfloat16(),
    "minus_zeros": lambda: -torch.zeros(3, 5),
    "below_the_floor": lambda: gaussian(4, 4) * 1e-11,
    "float32_subnormals": lambda: gaussian(4, 4) * 1e-41,
    "huge": lambda: gaussian(4, 4).clamp(-1, 1) * 3.4e38,
    "part_of_a_wider_one": lambda: gaussian(200, 400).bfloat16()[3:, 5:350],
    "transposed": lambda: gaussian(150, 260).bfloat16().T,
}

OTHER_BLOCKS = ((16, 64), (5, 60))
"""Of a smaller weight: block sides that are powers of two, and not."""


def small() -> Tensor:
    return steep(23, 150).bfloat16()


NON_FINITE: dict[str, Callable[[], Tensor]] = {
    f"{name} {dtype}": lambda value=value, dtype=dtype: torch.ones(130, 130).index_put(
        (torch.tensor(129), torch.tensor(129)), torch.tensor(value)
    ).to(dtype)
    for name, value in (("nan", math.nan), ("-nan", -math.nan), ("inf", math.inf), ("-inf", -math.inf))
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
}  # fmt: skip
