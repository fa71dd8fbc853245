"""The size of an optimizer step by the age of what it learns from.

An older policy's samples say less about where the present one should go, and every step in between adds to what they
are wrong about. Staleness-aware SGD (arXiv 1511.05950) divides the learning rate by the age. The root of 1 + age is
gentler, and is 1 for fresh samples. It is on the learning rate and not on the loss: Adam cancels a factor on the loss.
"""

from __future__ import annotations

from typing import Literal

LrByLag = Literal["none", "sqrt"]


def lr_factor(age: float) -> float:
    """(1 + age)^(-1/2) for a batch whose tokens were sampled `age` optimizer steps ago in the mean."""
    return float((1.0 + age) ** -0.5)
