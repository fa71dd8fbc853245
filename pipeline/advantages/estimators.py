"""What the learner loop holds: the recipe's advantage, with whatever state it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages import formulas
from pipeline.advantages.fade import FADE
from pipeline.advantages.formulas import Formula
from pipeline.config.algorithm import (
    AdvantageSection,
    AsymGRPOAdvantage,
    FADEAdvantage,
    FGRPOAdvantage,
    PassAtKAdvantage,
    PowerAdvantage,
)
from pipeline.data.records import Batch

PLAIN: dict[str, Formula] = {
    "grpo": formulas.grpo,
    "dr_grpo": formulas.dr_grpo,
    "rloo": formulas.rloo,
    "maxrl": formulas.maxrl,
}
"""The formulas without parameters, by their name in the recipe."""


class AdvantageEstimator(Protocol):
    """Every rank holds one and feeds it the same numbers, so all of them agree."""

    def advantages(self, batch: Batch) -> NDArray[np.float32]:
        """[samples]; depends on the batch and the present state alone. Raises NonFiniteError on a reward that is not
        finite."""
        ...

    def observe(self, *, solve_rate: float, entropy: float) -> None:
        """After each step: the share of the batch's samples with a reward of at least 1, and the policy's entropy in
        nats a token. Raises NonFiniteError on a number that is not finite."""
        ...

    def state(self) -> dict[str, float]:
        """What a checkpoint must hold for a resumed run to go on with the same formula."""
        ...

    def restore(self, state: Mapping[str, float]) -> None:
        """Take up what `state` returned; an empty one begins anew. Raises CorruptCheckpointError when a part is
        missing."""
        ...

    def measured(self) -> dict[str, float]:
        """What the next step will be weighed with, by the name of its metric; empty for a fixed formula."""
        ...


@dataclass(frozen=True)
class Fixed:
    """An advantage whose formula never changes."""

    formula: Formula

    def advantages(self, batch: Batch) -> NDArray[np.float32]:
        """See AdvantageEstimator, as for the others."""
        return self.formula(batch.reward, batch.group)

    def observe(self, *, solve_rate: float, entropy: float) -> None:
        """Nothing to learn from it."""

    def state(self) -> dict[str, float]:
        """None."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Nothing to take up."""

    def measured(self) -> dict[str, float]:
        """None."""
        return {}


def build_advantages(section: AdvantageSection) -> AdvantageEstimator:
    """The estimator that the recipe names, at the beginning of a run."""
    return FADE(section) if isinstance(section, FADEAdvantage) else Fixed(formula_of(section))


def formula_of(section: AdvantageSection) -> Formula:
    """The formula that the recipe names; of FADE, the one of a run's first step."""
    if isinstance(section, PassAtKAdvantage):
        return partial(formulas.pass_at_k, k=section.k)
    if isinstance(section, FGRPOAdvantage):
        return partial(formulas.f_grpo, gamma=section.gamma)
    if isinstance(section, AsymGRPOAdvantage):
        return partial(formulas.asym_grpo, delta=section.delta)
    if isinstance(section, PowerAdvantage):
        return partial(formulas.power, alpha=section.alpha, delta=section.delta)
    if isinstance(section, FADEAdvantage):
        return formula_of(FADE(section).as_power())
    return PLAIN[section.name]
