"""The size of an optimizer step by the age of what it learns from.

An older policy's samples say less about where the present one should go, and every step in between adds to what they
are wrong about. Staleness-aware SGD (arXiv 1511.05950) divides the learning rate by the age. The root of 1 + age is
gentler, and is 1 for fresh samples. Where the ESS of the staleness is measured it can decide instead, as in VCPO (arXiv
2602.17616, which scales by an ESS in another form). All of it is on the learning rate and not on the loss: Adam cancels
a factor on the loss.
"""

from __future__ import annotations

import math
from typing import Literal

LrByLag = Literal["none", "sqrt", "ess"]


def lr_factor(age: float) -> float:
    """(1 + age)^(-1/2) for a batch whose tokens were sampled `age` optimizer steps ago in the mean."""
    return float((1.0 + age) ** -0.5)


def lr_factor_of_ess(ess: float) -> float:
    """1 - √(1 - e) for an ESS e of the staleness in [0, 1]: 1 while nothing is stale, .8 at .96, .29 at .5. √(1 - e) is
    about the spread of the ratios."""
    return 1.0 - math.sqrt(1.0 - ess)
