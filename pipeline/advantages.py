"""Advantages that compare the samples of one prompt (its group).

    grpo        (r - mean) / (std + 1e-6)      DeepSeekMath, arXiv 2402.03300, eq. 3 text
    grpo_mean   r - mean                       Dr. GRPO, arXiv 2503.20783
    rloo        r - mean of the others         arXiv 2402.14740; equals grpo_mean × G / (G - 1)

The std is the sample standard deviation (G - 1 in the denominator), as computed by torch.std, which the common GRPO
trainers call; the paper does not say. The population one would scale every advantage by sqrt(G / (G - 1)).
A group of equal rewards, and a group of one, says nothing: its advantages are exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import NonFiniteError, RecipeError

GRPO_EPSILON = 1e-6

Advantage = Callable[[NDArray[np.float32], NDArray[np.int64]], NDArray[np.float32]]
"""(reward [n], group [n]) → advantage [n] float32. Groups may differ in size and need not be adjacent."""


def grpo(reward: NDArray[np.float32], group: NDArray[np.int64]) -> NDArray[np.float32]:
    """[n] float32: z-score of each reward within its group. Raises NonFiniteError on a NaN or infinite reward."""
    centred = _centre(reward, group)
    variance = np.bincount(centred.group, centred.deviation**2) / np.maximum(centred.sizes - 1, 1)
    scaled = centred.deviation / (np.sqrt(variance)[centred.group] + GRPO_EPSILON)
    return scaled.astype(np.float32)


def grpo_mean(reward: NDArray[np.float32], group: NDArray[np.int64]) -> NDArray[np.float32]:
    """[n] float32: reward minus the mean of its group. Raises NonFiniteError on a NaN or infinite reward."""
    return _centre(reward, group).deviation.astype(np.float32)


def rloo(reward: NDArray[np.float32], group: NDArray[np.int64]) -> NDArray[np.float32]:
    """[n] float32: reward minus the mean of the others in its group. Raises NonFiniteError on a NaN or infinite
    reward."""
    centred = _centre(reward, group)
    factor = centred.sizes / np.maximum(centred.sizes - 1, 1)
    return (centred.deviation * factor[centred.group]).astype(np.float32)


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "grpo_mean": grpo_mean, "rloo": rloo}
"""By their name in the recipe (`advantage.name`)."""


def estimator(name: str) -> Advantage:
    """The estimator that the recipe names. Raises RecipeError for an unknown one."""
    if name not in ADVANTAGES:
        raise RecipeError(f"advantage.name is {name!r}, expected one of {', '.join(ADVANTAGES)}; set one of them")
    return ADVANTAGES[name]


class _Centred(NamedTuple):
    deviation: NDArray[np.float64]
    """[n] reward minus group mean; exactly 0 in a constant group."""
    group: NDArray[np.int64]
    """[n] groups renumbered 0 … groups - 1."""
    sizes: NDArray[np.int64]
    """[groups]"""


def _centre(reward: NDArray[np.float32], group: NDArray[np.int64]) -> _Centred:
    if reward.shape != group.shape or reward.ndim != 1:
        raise ValueError(f"reward is {reward.shape} and group is {group.shape}, expected the same [n]")
    if not np.isfinite(reward).all():
        sample = int(np.flatnonzero(~np.isfinite(reward))[0])
        raise NonFiniteError(
            f"reward of sample {sample} is {reward[sample]}, expected a finite number; mend the reward function"
        )
    rewards = reward.astype(np.float64)
    _, members, sizes = np.unique(group, return_inverse=True, return_counts=True)
    mean = np.bincount(members, rewards) / sizes if len(members) else np.empty(0)
    # Sums of float32 rewards are exact in float64, so the deviations of a constant group are 0 and not a rounding,
    # which grpo would blow up to ±1.
    deviation = rewards - mean[members]
    return _Centred(deviation, members.astype(np.int64), sizes.astype(np.int64))
