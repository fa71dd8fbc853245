"""How much weight an advantage puts on successes and failures of a prompt, by its solve rate p (q = 1 - p).

With binary rewards, an advantage is w_S on successes and -w_F on failures, and the gradient of a prompt is

    m_S E[∇log π | success] - m_F E[∇log π | failure],   m_S = p w_S,  m_F = q w_F

so two functions of p tell two methods apart (arXiv 2607.01490): the height over p says which difficulty is learned
from, the ratio m_S / m_F how much failures are pushed down. Exactly on-policy, p E[∇log π | S] + q E[∇log π | F] = 0
and only w_S + w_F matters; the ratio acts through reuse, clipping and finite groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages.base import Advantage, Curve
from pipeline.advantages.groups import Grouped
from pipeline.data.batch import SOLVED_REWARD


@dataclass(frozen=True)
class WeightCurves:
    """m_S and m_F at each of the solve rates `p`; all [points]."""

    p: Curve
    success: Curve
    failure: Curve


def weight_curves(advantage: Advantage, p: Curve) -> WeightCurves | None:
    """The curves at the solve rates `p` [points] in [0, 1] for an infinite group, in closed form; None where the
    advantage states none. FADE's are those of its first step; `Advantage.at_last` gives later ones."""
    found = advantage.closed_form(p)
    return None if found is None else WeightCurves(p, *found)


def binomial_weight_curves(advantage: Advantage, p: Curve, group_size: int) -> WeightCurves:
    """As `weight_curves`, the exact mean over groups of `group_size` samples: every group that there is, from none
    solved to all, each as likely as the binomial says."""
    solved, member = np.meshgrid(np.arange(group_size + 1), np.arange(group_size), indexing="ij")
    reward, group = (member < solved).astype(np.float32).ravel(), solved.astype(np.int64).ravel()
    each = empirical_weight_curves(advantage.advantages(reward, group), reward, group)
    chance = np.array([math.comb(group_size, n) * p**n * (1.0 - p) ** (group_size - n) for n in range(group_size + 1)])
    return WeightCurves(p, each.success @ chance, each.failure @ chance)


def empirical_weight_curves(
    advantages: NDArray[np.float64], reward: NDArray[np.float32], group: NDArray[np.int64]
) -> WeightCurves:
    """The curves of given advantages [n] of rewards [n] in groups [n], averaged over the groups
    with the same share of successes: one point a share, ascending."""
    solved = Grouped.of((reward >= SOLVED_REWARD).astype(np.float64), group)
    success = solved.total(np.where(solved.values > 0.0, advantages, 0.0)) / solved.sizes
    failure = -solved.total(np.where(solved.values > 0.0, 0.0, advantages)) / solved.sizes
    rates, which, count = np.unique(solved.total(solved.values) / solved.sizes, return_inverse=True, return_counts=True)
    return WeightCurves(rates, np.bincount(which, success) / count, np.bincount(which, failure) / count)
