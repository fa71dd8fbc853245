"""What a response loses by being long: DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).

    0                                   up to L - C tokens
    penalty (L - C - tokens) / C        above, down to -penalty at L

L is rollout.max_new_tokens, where engines cut: the paper's L_max, 20,480. C is its L_cache, 4,096. The paper's penalty
is 1 beside rewards of +1 and -1. Advantages that divide by the standard deviation of a group are the same for 1/2
beside rewards of 1 and 0.

It is added where advantages are made, not where rewards are stored: a long right answer still counts as solved, in pass
rates, in dynamic sampling (verl's DAPO filters by accuracy, too) and in evaluations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from precision.settings import Settings


class OverlongPenalty(Settings):
    buffer_tokens: PositiveInt = Field(
        description="The penalty grows over so many tokens before rollout.max_new_tokens; DAPO a fifth of those "
        "(4,096 of 20,480)."
    )
    penalty: float = Field(
        1.0,
        gt=0.0,
        description="What a response of max_new_tokens loses. DAPO 1 with rewards of 1 and -1, which is 0.5 with "
        "rewards of 1 and 0.",
    )

    def of(self, lengths: NDArray[np.int64], *, max_new_tokens: int) -> NDArray[np.float32]:
        """[samples] what responses of `lengths` [samples] tokens lose, from -penalty to 0."""
        beyond = lengths - (max_new_tokens - self.buffer_tokens)
        return np.asarray(-self.penalty * np.clip(beyond / self.buffer_tokens, 0.0, 1.0), np.float32)
