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

from pipeline.advantages.estimators import formula_of
from pipeline.advantages.fade import FADE
from pipeline.advantages.groups import Grouped
from pipeline.config.algorithm import (
    AdvantageSection,
    AsymGRPOAdvantage,
    FADEAdvantage,
    FGRPOAdvantage,
    PassAtKAdvantage,
    PowerAdvantage,
)

Values = NDArray[np.float64]


@dataclass(frozen=True)
class WeightCurves:
    """m_S and m_F at each of the solve rates `p`; all [points]."""

    p: Values
    success: Values
    failure: Values


def weight_curves(section: AdvantageSection, p: Values, *, group_size: int | None = None) -> WeightCurves:
    """The curves at the solve rates `p` [points] in [0, 1]: in closed form for an infinite group, or the exact mean
    over groups of `group_size` samples, that is over a binomial number of successes. FADE's are those of its first
    step; later ones are those of `FADE.as_power()`."""
    return _closed_form(section, p) if group_size is None else _binomial_mean(section, p, group_size)


def empirical_weight_curves(
    advantages: NDArray[np.float32], reward: NDArray[np.float32], group: NDArray[np.int64]
) -> WeightCurves:
    """The curves of given advantages [n] of rewards [n] (solved from 1 on) in groups [n], averaged over the groups
    with the same share of successes: one point a share, ascending."""
    solved = Grouped.of((reward >= 1.0).astype(np.float64), group)
    success = solved.total(np.where(solved.values > 0.0, advantages, 0.0)) / solved.sizes
    failure = -solved.total(np.where(solved.values > 0.0, 0.0, advantages)) / solved.sizes
    rates, which, count = np.unique(solved.total(solved.values) / solved.sizes, return_inverse=True, return_counts=True)
    return WeightCurves(rates, np.bincount(which, success) / count, np.bincount(which, failure) / count)


def _closed_form(section: AdvantageSection, p: Values) -> WeightCurves:
    q = 1.0 - p
    if isinstance(section, FADEAdvantage):
        return _closed_form(FADE(section).as_power(), p)
    if isinstance(section, PowerAdvantage):
        mass = p * q**section.alpha
        return WeightCurves(p, mass, mass / section.delta)
    if isinstance(section, AsymGRPOAdvantage):
        return WeightCurves(p, p * q, p * q / section.delta)
    if isinstance(section, PassAtKAdvantage):
        mass = section.k * p * q**section.k
    elif isinstance(section, FGRPOAdvantage):
        mass = np.sqrt(p * q) * q**section.gamma
    else:
        mass = {"grpo": np.sqrt(p * q), "dr_grpo": p * q, "rloo": p * q, "maxrl": q}[section.name]
    return WeightCurves(p, mass, mass)


def _binomial_mean(section: AdvantageSection, p: Values, group_size: int) -> WeightCurves:
    """Every group that there is, from none solved to all, each as likely as the binomial says."""
    solved, member = np.meshgrid(np.arange(group_size + 1), np.arange(group_size), indexing="ij")
    reward, group = (member < solved).astype(np.float32).ravel(), solved.astype(np.int64).ravel()
    each = empirical_weight_curves(formula_of(section)(reward, group), reward, group)
    chance = np.array([math.comb(group_size, n) * p**n * (1.0 - p) ** (group_size - n) for n in range(group_size + 1)])
    return WeightCurves(p, each.success @ chance, each.failure @ chance)
