"""FADE (arXiv 2607.01490): the Power advantage, whose two numbers follow the run.

    A     = (1 - r̄)^(alpha - 1) × { r - r̄ where r >= r̄, (r - r̄) / delta below }
    alpha = clip(3 (1 - p̂) / (2 p̂), 1, alpha_max)       3 while a third is solved, 1.5 at half, 1 from .6 on
    delta = clip(1 + Ĥ - H*, delta_min, 1)              below 1, failures push harder: the policy narrows too fast

with r̄ the mean of the group, p̂ the solve rate and Ĥ the entropy (nats a token) of the whole run, both smoothed.
Successes then weigh m_S = p q^alpha, failures p q^alpha / delta (weight_curves.py); the peak is at p = 1 / (1 + alpha).

Known of the paper: the formulas, alpha_max 3, delta_min .3, beta .02, p̂ starts at .5, Ĥ at the initial entropy; alpha
follows the solve rate and delta the entropy (both by entropy did worse). Left open, because its full text could not be
read, and therefore options:

    smoothing_keeps   its published summary writes x ← beta x + (1 - beta) new, which with beta .02 hardly smooths at
                      all ("new"); "old", the default, is the usual x ← (1 - beta) x + beta new, a window of 50 steps
    target_entropy    H*: 1.0 and 1.3 nats in its tables, about half the initial entropy, which is the default here

and r̄, said to be a mean of the batch, must be the group's for the weights above to come out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat

from pipeline.advantages.base import Advantage, Curve, Groups, Rewards
from pipeline.advantages.methods.power import Power
from pipeline.errors import CorruptCheckpointError, NonFiniteError
from precision.measures import Measure

FIRST_SOLVE_RATE = 0.5
"""p̂ before any step."""

TARGET_SHARE = 0.5
"""H* over the entropy of the first step, where the recipe names no target."""


class FADE(Advantage):
    """Settings of the schedule; `FADEEstimator` follows the run."""

    name: Literal["fade"] = "fade"
    alpha_max: float = Field(3.0, ge=1.0, description="Largest alpha, while few prompts are solved.")
    delta_min: float = Field(0.3, gt=0.0, le=1.0, description="Smallest delta, while the policy narrows.")
    target_entropy: PositiveFloat | None = Field(None, description="H*, nats; default half the first step's entropy.")
    smoothing: float = Field(0.02, gt=0.0, le=1.0, description="beta: the share of a step in p̂ and Ĥ.")
    smoothing_keeps: Literal["old", "new"] = Field(
        "old", description="old: x ← (1 - beta) x + beta new, a window of 1/beta steps; new: the other way round."
    )

    asks_what_is_solved: ClassVar[bool] = True
    moving_parts: ClassVar[tuple[str, ...]] = ("alpha", "delta")
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("Alpha and delta", (("advantage_alpha", "alpha", "violet"), ("advantage_delta", "delta", "orange"))),
        Measure(
            "Solve rate, smoothed",
            (("solve_rate", "batch", "gray"), ("advantage_solve_rate", "p̂", "blue")),
            percent=True,
            floor=0.0,
        ),
        Measure(
            "Entropy, smoothed",
            (
                ("entropy", "batch", "gray"),
                ("advantage_entropy", "Ĥ", "blue"),
                ("advantage_target_entropy", "H*", "orange"),
            ),
        ),
    )

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """Those of a run's first step."""
        return self.estimator().advantages(reward, group)

    def closed_form(self, p: Curve) -> tuple[Curve, Curve]:
        """That of a run's first step."""
        return self.estimator().as_power().closed_form(p)

    def estimator(self) -> FADEEstimator:
        """See `Advantage.estimator`."""
        return FADEEstimator(self)

    def at_last(self, last: Callable[[str], float | None]) -> Advantage:
        """Power at the newest alpha and delta; before the first step, this."""
        alpha, delta = last("advantage_alpha"), last("advantage_delta")
        return self if alpha is None or delta is None else Power(alpha=alpha, delta=delta)


class FADEEstimator:
    """An AdvantageEstimator. Until a first entropy is known, delta is 1."""

    def __init__(self, settings: FADE) -> None:
        self._settings = settings
        self._solve_rate = FIRST_SOLVE_RATE
        self._entropy: float | None = None
        self._target = settings.target_entropy

    @property
    def alpha(self) -> float:
        """How much harder prompts are preferred; from 1 to alpha_max."""
        # Written without the division by a solve rate that may be 0.
        if 3.0 * (1.0 - self._solve_rate) >= self._settings.alpha_max * 2.0 * self._solve_rate:
            return self._settings.alpha_max
        return max(1.0, 3.0 * (1.0 - self._solve_rate) / (2.0 * self._solve_rate))

    @property
    def delta(self) -> float:
        """What negative advantages are divided by; from delta_min to 1."""
        if self._entropy is None or self._target is None:
            return 1.0
        return min(1.0, max(self._settings.delta_min, 1.0 + self._entropy - self._target))

    def as_power(self) -> Power:
        """The fixed advantage that this one is at this moment."""
        return Power(alpha=self.alpha, delta=self.delta)

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """[samples] with the present alpha and delta."""
        return self.as_power().advantages(reward, group)

    def observe(self, *, solve_rate: float, entropy: float) -> None:
        """Smooth p̂ and Ĥ with those of a step. Raises NonFiniteError, ValueError for a rate outside [0, 1]."""
        if not math.isfinite(entropy):
            raise NonFiniteError(f"entropy of the step is {entropy}, expected a finite number of nats")
        if not 0.0 <= solve_rate <= 1.0:
            raise ValueError(f"solve_rate is {solve_rate}, expected a share in [0, 1]")
        self._solve_rate = self._smoothed(self._solve_rate, solve_rate)
        self._entropy = entropy if self._entropy is None else self._smoothed(self._entropy, entropy)
        self._target = TARGET_SHARE * entropy if self._target is None else self._target

    def _smoothed(self, old: float, new: float) -> float:
        beta = self._settings.smoothing
        return old + (beta if self._settings.smoothing_keeps == "old" else 1.0 - beta) * (new - old)

    def state(self) -> dict[str, float]:
        """p̂, and from the first step on Ĥ and H*."""
        known = {
            "advantage_solve_rate": self._solve_rate,
            "advantage_entropy": self._entropy,
            "advantage_target_entropy": self._target,
        }
        return {name: value for name, value in known.items() if value is not None}

    def restore(self, state: Mapping[str, float]) -> None:
        """Take up a state. Raises CorruptCheckpointError when p̂ is missing."""
        if state and "advantage_solve_rate" not in state:
            raise CorruptCheckpointError(
                f"the checkpoint holds {', '.join(sorted(state))} but no advantage_solve_rate, which FADE goes on "
                "from; the run was begun with another advantage: give this one another run.name"
            )
        self._solve_rate = state.get("advantage_solve_rate", FIRST_SOLVE_RATE)
        self._entropy = state.get("advantage_entropy")
        if self._settings.target_entropy is None:  # else that one holds: a fork may have another
            self._target = state.get("advantage_target_entropy")

    def measured(self) -> dict[str, float]:
        """The state, with the alpha and delta that follow from it."""
        return self.state() | {"advantage_alpha": self.alpha, "advantage_delta": self.delta}
