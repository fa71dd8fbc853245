"""Advantages that compare the samples of one prompt (its group), and what they weigh.

groups      the statistics of ragged groups
formulas    reward and group in, advantage out, one function a method
estimators  what the learner loop holds: a formula of the recipe, with its state
fade        FADE, whose formula follows the solve rate and the entropy of the run
weight_curves      how much weight a method puts on successes and failures, by solve rate
"""

from __future__ import annotations

from pipeline.advantages.estimators import AdvantageEstimator, build_advantages
from pipeline.advantages.fade import FADE
from pipeline.advantages.weight_curves import WeightCurves, empirical_weight_curves, weight_curves

__all__ = ["FADE", "AdvantageEstimator", "WeightCurves", "build_advantages", "empirical_weight_curves", "weight_curves"]
