"""Values of samples, seen by group. Groups may differ in size and need not be adjacent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import NonFiniteError


@dataclass(frozen=True)
class Grouped:
    """`values` [n] float64 of samples, `members` [n] the group of each, 0 … groups - 1, `sizes` [groups]."""

    values: NDArray[np.float64]
    members: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @staticmethod
    def of(values: NDArray[Any], group: NDArray[np.int64]) -> Grouped:
        """`values` [n] and `group` [n], any numbers. Raises NonFiniteError on a value that is NaN or infinite."""
        if values.shape != group.shape or values.ndim != 1:
            raise ValueError(f"reward is {values.shape} and group is {group.shape}, expected the same [n]")
        if not np.isfinite(values).all():
            sample = int(np.flatnonzero(~np.isfinite(values))[0])
            raise NonFiniteError(
                f"reward of sample {sample} is {values[sample]}, expected a finite number; correct the reward function"
            )
        _, members, sizes = np.unique(group, return_inverse=True, return_counts=True)
        return Grouped(values.astype(np.float64), members.astype(np.int64), sizes.astype(np.int64))

    @staticmethod
    def clipped(values: NDArray[Any], group: NDArray[np.int64]) -> Grouped:
        """As `of`, with the values clipped to [0, 1], so that a group's mean is its solve rate."""
        groups = Grouped.of(values, group)
        return groups.with_values(groups.values.clip(0.0, 1.0))

    def with_values(self, values: NDArray[Any]) -> Grouped:
        """Other values [n] of the same samples."""
        return Grouped(values.astype(np.float64), self.members, self.sizes)

    def total(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """[groups] sums of any `values` [n]."""
        return np.bincount(self.members, values, minlength=len(self.sizes)).astype(np.float64)

    def any_member(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[n] whether any sample of the sample's group is `chosen` [n]."""
        return np.asarray(self.total(chosen)[self.members] > 0)

    @cached_property
    def mean(self) -> NDArray[np.float64]:
        """[n] of the sample's group."""
        return np.asarray((self.total(self.values) / self.sizes)[self.members])

    @cached_property
    def deviation(self) -> NDArray[np.float64]:
        """[n] value minus group mean. Sums of float32 numbers are exact in float64, so in a group of equal values it is
        0 and not a rounding, which a division by the standard deviation would blow up to ±1."""
        return self.values - self.mean

    @cached_property
    def std(self) -> NDArray[np.float64]:
        """[n] sample standard deviation (size - 1 in the denominator) of the sample's group; 0 in a group of one."""
        variance = self.total(self.deviation**2) / np.maximum(self.sizes - 1, 1)
        return np.asarray(np.sqrt(variance)[self.members])
