"""Which data parallel rank of the learner takes which samples of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """What one rank takes. All know what each of them takes, so that each works out the plan of all."""

    ranks: NDArray[np.int64]
    """[n] the data parallel rank that takes each sample."""
    rank: int
    """Whose share this is."""

    @property
    def held(self) -> NDArray[np.bool_]:
        """[n] True on the samples of this rank."""
        return np.asarray(self.ranks == self.rank)

    def select(self, samples: NDArray[np.bool_]) -> Share:
        """Of those `samples` [n] alone."""
        return Share(ranks=self.ranks[samples], rank=self.rank)
