"""One function a method: reward [n] float32 and group [n] in, advantage [n] float32 out.

With r the reward, r̄ the mean and s the standard deviation of the group, G its size:

    grpo        (r - r̄) / (s + 1e-6)                               DeepSeekMath, arXiv 2402.03300, eq. 3 text
    dr_grpo     r - r̄                                              arXiv 2503.20783
    rloo        r - mean of the others = (r - r̄) G / (G - 1)       arXiv 2402.14740
    maxrl       (r - r̄) / r̄                                        arXiv 2602.02710
    pass_at_k   unbiased gradient of pass@k, leave-one-out baseline  arXiv 2505.15201
    f_grpo      grpo × (1 - r̄)^gamma                               arXiv 2602.06717
    asym_grpo   r - r̄, divided by delta where negative             a probe of FADE's paper, arXiv 2607.01490
    power       (1 - r̄)^(alpha - 1) × asym_grpo                    the same; FADE at one moment

s is the sample standard deviation, as torch.std computes it, which the common GRPO trainers call; the paper does not
say. The population one would scale every advantage by sqrt(G / (G - 1)).

grpo, dr_grpo, rloo and asym_grpo take rewards of any kind. The others are defined by a solve rate: maxrl, f_grpo and
power read rewards clipped to [0, 1], so that {0, 1} and {-1, 1} are the same and partial credit stays partial;
pass_at_k counts a reward of at least 1 as solved. A group of equal rewards, and a group of one, says nothing: its
advantages are exactly 0. Each raises NonFiniteError on a reward that is NaN or infinite.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages.groups import Grouped
from pipeline.errors import RecipeError

GRPO_EPSILON = 1e-6

Formula = Callable[[NDArray[np.float32], NDArray[np.int64]], NDArray[np.float32]]
"""(reward [n], group [n]) → advantage [n]"""

Rewards = NDArray[np.float32]
Groups = NDArray[np.int64]


def grpo(reward: Rewards, group: Groups) -> NDArray[np.float32]:
    """z-score within the group."""
    groups = Grouped.of(reward, group)
    return (groups.deviation / (groups.std + GRPO_EPSILON)).astype(np.float32)


def dr_grpo(reward: Rewards, group: Groups) -> NDArray[np.float32]:
    """Reward minus group mean; ScaleRL's with `batch_normalized`."""
    return Grouped.of(reward, group).deviation.astype(np.float32)


def rloo(reward: Rewards, group: Groups) -> NDArray[np.float32]:
    """Reward minus the mean of the others."""
    groups = Grouped.of(reward, group)
    factor = groups.sizes / np.maximum(groups.sizes - 1, 1)
    return (groups.deviation * factor[groups.members]).astype(np.float32)


def maxrl(reward: Rewards, group: Groups) -> NDArray[np.float32]:
    """Deviation relative to the mean, 0 in a group without any success: the gradient of log p, up to order G - 1 of its
    expansion in pass@k."""
    groups = _clipped(reward, group)
    return (groups.deviation / np.where(groups.mean > 0.0, groups.mean, 1.0)).astype(np.float32)


def pass_at_k(reward: Rewards, group: Groups, *, k: int) -> NDArray[np.float32]:
    """With c of G samples solved, k × (pass@k of subsets with the sample - pass@k of subsets without it), each averaged
    over all subsets of k, which needs G > k:

        solved    k C(G - c, k) / C(G - 1, k)
        failed    k (C(G - c - 1, k) / C(G - 1, k) - C(G - c - 1, k - 1) / C(G - 1, k - 1))

    The baseline does not see the sample, so the gradient is unbiased; a group sums to 0; k = 1 is rloo. Raises
    RecipeError for a group of k samples or fewer.
    """
    groups = Grouped.of(reward, group)
    groups = groups.with_values(groups.values >= 1.0)
    if len(groups.sizes) and int(groups.sizes.min()) <= k:
        raise RecipeError(
            f"advantage.k is {k}, but a group has {int(groups.sizes.min())} samples and needs at least {k + 1}; "
            "lower advantage.k or raise rollout.group_size"
        )
    failed, others = groups.sizes - groups.total(groups.values), groups.sizes - 1
    solved_advantage = k * _all_chosen(failed, others, k)
    failed_advantage = k * (_all_chosen(failed - 1, others, k) - _all_chosen(failed - 1, others, k - 1))
    return np.where(groups.values > 0.0, solved_advantage[groups.members], failed_advantage[groups.members]).astype(
        np.float32
    )


def f_grpo(reward: Rewards, group: Groups, *, gamma: float) -> NDArray[np.float32]:
    """grpo, times a focal weight that falls with the group's solve rate."""
    failure_rate = 1.0 - _clipped(reward, group).mean
    return (grpo(reward, group) * failure_rate**gamma).astype(np.float32)


def asym_grpo(reward: Rewards, group: Groups, *, delta: float) -> NDArray[np.float32]:
    """Reward minus group mean; negative ones are divided by delta."""
    return _asymmetric(Grouped.of(reward, group), delta).astype(np.float32)


def power(reward: Rewards, group: Groups, *, alpha: float, delta: float) -> NDArray[np.float32]:
    """asym_grpo of clipped rewards, times a weight that falls with the group's solve rate."""
    groups = _clipped(reward, group)
    return ((1.0 - groups.mean) ** (alpha - 1.0) * _asymmetric(groups, delta)).astype(np.float32)


def _clipped(reward: Rewards, group: Groups) -> Grouped:
    groups = Grouped.of(reward, group)
    return groups.with_values(groups.values.clip(0.0, 1.0))


def _asymmetric(groups: Grouped, delta: float) -> NDArray[np.float64]:
    return np.where(groups.deviation < 0.0, groups.deviation / delta, groups.deviation)


def _all_chosen(of_kind: NDArray[np.float64], total: NDArray[np.int64], k: int) -> NDArray[np.float64]:
    """[groups] chance that k of `total` things, drawn without replacement, are all among the `of_kind` ones:
    C(of_kind, k) / C(total, k), as a product because the binomials overflow."""
    chance = np.ones(len(total))
    for drawn in range(k):
        chance *= np.maximum(of_kind - drawn, 0.0) / (total - drawn)
    return chance
