"""Keys and values kept in e4m3, by one scale each for all tokens of a layer.

A cache is written before later tokens are known, so its scale cannot be the largest magnitude of what is in it, as a
weight's is. It is calibrated beforehand, on other tokens, and what exceeds it saturates. An engine takes the scale 1
where a checkpoint has none. That is a scale like others while |k| and |v| lie between 2^-6 and 448; keys of models with
biases exceed it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from precision.formats.formats import scale_of, straight_through, to_e4m3

MARGIN = 1.5
"""Times the largest magnitude that was seen in calibration."""


def calibrated_scale(largest: float, margin: float = MARGIN) -> float:
    """The scale of a cache whose keys, or values, reached `largest` in magnitude over the tokens of a calibration.

    Raises ValueError unless both are positive and finite.
    """
    if not (0 < largest < math.inf and 1 <= margin < math.inf):
        raise ValueError(
            f"largest magnitude is {largest}, margin {margin}; expected a positive number and at least 1; calibrate on "
            "tokens that the model has seen"
        )
    return float(scale_of(torch.tensor(largest * margin)))


def require_calibrated(scales: Mapping[str, float]) -> None:
    """Raises ValueError naming the layers whose scale is 1, the engines' silent default, or is no scale at all."""
    wrong = [f"{name} ({scale:g})" for name, scale in scales.items() if not 0 < scale < math.inf or scale == 1.0]
    if wrong:
        raise ValueError(
            f"{len(wrong)} of {len(scales)} scales of the FP8 cache are not calibrated, first {wrong[0]}; engines take "
            "1 where a checkpoint has none; calibrate them, or keep the cache in the engine's dtype"
        )


def fake_quantize_cache(values: Tensor, scale: float) -> Tensor:
    """`values` [..., head size] as they are read back from the cache, in their dtype: |error| <= max(2^-4 |value|,
    2^-10 scale) up to 448 scale, beyond which they saturate. Gradients pass straight through."""
    return straight_through(values, to_e4m3(values.detach().float() / scale).float() * scale)
