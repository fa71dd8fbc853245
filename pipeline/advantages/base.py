"""What every advantage takes, returns and states about itself.

An advantage is one class in one file of `pipeline.advantages.methods`. Its fields are the keys of the section
`advantage` of a recipe, its method `advantages` is the formula. Most formulas are fixed for a whole run. One that
changes from step to step (FADE) keeps what it has learned in an estimator of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from precision.measures import Measure
from precision.objectives.base import Aggregation
from precision.settings import Settings

Rewards = NDArray[np.float32]
"""[n], one a sample."""
Groups = NDArray[np.int64]
"""[n], the group (prompt) of each sample, in any order."""
Curve = NDArray[np.float64]
"""[points], over solve rates."""


class Advantage(Settings, ABC):
    """Settings and formula of one advantage. Only `name` and `advantages` must be written."""

    name: str
    aggregation: Aggregation = Field(
        "token",
        description="What counts alike in the mean: tokens (DAPO), responses (GRPO's paper), prompts with their tokens "
        "alike (ScaleRL), or tokens over a fixed length (Dr. GRPO: rollout.max_new_tokens). Default: that of the "
        "objective's paper, otherwise that of the advantage's, otherwise token.",
    )
    batch_normalized: bool = Field(False, description="Divide by the standard deviation over the batch (ScaleRL).")
    zero_variance: Literal["keep", "skip", "exclude"] = Field(
        "keep",
        description="Groups of equal rewards, which have no policy gradient. keep: trained on like the others. skip: "
        "not run through the learner, but counted in every denominator and batch statistic; the gradient is that of "
        "keep (refused with fade, which follows the entropy of all groups). exclude: no part of the loss, its "
        "denominators and the batch statistics (ScaleRL's effective batch).",
    )
    truncated: Literal["keep", "exclude"] = Field(
        "keep",
        description="Responses that were cut at rollout.max_new_tokens. keep: trained on like the others. exclude: not "
        "run through the learner, no part of the loss and its denominators (DAPO's overlong filtering); their rewards "
        "count in their groups.",
    )

    asks_what_is_solved: ClassVar[bool] = False
    """Whether the formula compares rewards with 1, or clips them to [0, 1]: nothing may be added to those, and
    they come divided by reward.solved_at."""
    moving_parts: ClassVar[tuple[str, ...]] = ()
    """What of the formula changes during a run, by the names that a report gives it. With any, zero_variance skip is
    refused: `observe` would be told the entropy of some groups alone."""
    measures: ClassVar[tuple[Measure, ...]] = ()
    """How a report draws what the estimator's `measured` returns."""

    @abstractmethod
    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """[n] the advantage of each sample; 0 throughout a group of equal rewards.

        Raises NonFiniteError on a reward that is NaN or infinite.
        """

    @property
    def smallest_group(self) -> int:
        """Samples of a prompt that the formula needs."""
        return 2

    def closed_form(self, p: Curve) -> tuple[Curve, Curve] | None:  # noqa: ARG002
        """m_S and m_F (see weight_curves.py) at the solve rates `p` [points], for an infinitely large group; None where
        nobody has worked them out."""
        return None

    def estimator(self) -> AdvantageEstimator:
        """What the learner loop holds, at the beginning of a run."""
        return FixedEstimator(self)

    def at_last(self, last: Callable[[str], float | None]) -> Advantage:  # noqa: ARG002
        """The fixed advantage that this one was when a run stopped; `last` gives the newest value of a metric."""
        return self


class AdvantageEstimator(Protocol):
    """An advantage at work in a run, with what it has learned from the run.

    Every rank holds one and tells it the same numbers. So all ranks have the same advantages.
    """

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """As `Advantage.advantages`. They depend on the batch and on the present state alone."""
        ...

    def observe(self, *, solve_rate: float, entropy: float) -> None:
        """Learn from a step that was trained: the share of the batch's samples that solved their problem, and the
        policy's entropy in nats a token. Raises NonFiniteError on a number that is not finite."""
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
class FixedEstimator:
    """The estimator of an advantage whose formula never changes: it learns nothing and keeps nothing."""

    advantage: Advantage

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """See `AdvantageEstimator`, as for the others."""
        return self.advantage.advantages(reward, group)

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
