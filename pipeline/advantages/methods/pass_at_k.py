"""pass_at_k: the unbiased gradient of pass@k with a leave-one-out baseline (arXiv 2505.15201)."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from pipeline.advantages.base import Advantage, Curve, Groups, Rewards
from pipeline.advantages.groups import Grouped
from pipeline.data.batch import SOLVED_REWARD
from pipeline.errors import RecipeError


class PassAtK(Advantage):
    """With c of G samples solved, k × (pass@k of subsets with the sample - pass@k of subsets without it), each averaged
    over all subsets of k, which needs G > k:

        solved    k C(G - c, k) / C(G - 1, k)
        failed    k (C(G - c - 1, k) / C(G - 1, k) - C(G - c - 1, k - 1) / C(G - 1, k - 1))

    The baseline does not see the sample, so the gradient is unbiased; a group sums to 0; k = 1 is rloo.
    """

    asks_what_is_solved: ClassVar[bool] = True
    name: Literal["pass_at_k"] = "pass_at_k"
    k: PositiveInt = Field(4, description="Attempts of which one must succeed; below rollout.group_size.")

    @property
    def smallest_group(self) -> int:
        return self.k + 1

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """See `Advantage.advantages`. Raises RecipeError for a group of k samples or fewer."""
        groups = Grouped.of(reward, group)
        groups = groups.with_values(groups.values >= SOLVED_REWARD)
        if len(groups.sizes) and int(groups.sizes.min()) <= self.k:
            raise RecipeError(
                f"advantage.k is {self.k}, but a group has {int(groups.sizes.min())} samples and needs at least "
                f"{self.k + 1}; lower advantage.k or raise rollout.group_size"
            )
        k, failed, others = self.k, groups.sizes - groups.total(groups.values), groups.sizes - 1
        of_solved = k * _all_chosen(failed, others, k)
        of_failed = k * (_all_chosen(failed - 1, others, k) - _all_chosen(failed - 1, others, k - 1))
        return np.where(groups.values > 0.0, of_solved[groups.members], of_failed[groups.members])

    def closed_form(self, p: Curve) -> tuple[Curve, Curve]:
        """k p q^k for both."""
        weight = self.k * p * (1.0 - p) ** self.k
        return weight, weight


def _all_chosen(of_kind: NDArray[np.float64], total: NDArray[np.int64], k: int) -> NDArray[np.float64]:
    """[groups] chance that k of `total` things, drawn without replacement, are all among the `of_kind` ones:
    C(of_kind, k) / C(total, k), as a product because the binomials overflow."""
    chance = np.ones(len(total))
    for drawn in range(k):
        chance *= np.maximum(of_kind - drawn, 0.0) / (total - drawn)
    return chance
