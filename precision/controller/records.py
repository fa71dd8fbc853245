"""What the controller reads, remembers and decides. All of it is plain JSON, and all numbers come back bit by bit.

Everything is in terms of the loss  -ln ESS, nats. For independent lognormal ratios the ESS is exp(-variance) of the
log-ratio, so the losses of independent causes add up: that of a batch is about the sum of those of its terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

from pydantic import Field, PositiveInt

from precision.settings import Settings

Cause = Literal["staleness", "quantization", "engine"]
Measurement = Literal["quantization", "groups"]
"""What evidence may lack until it is asked for: it costs passes over the model."""
MEASUREMENTS: tuple[Measurement, ...] = get_args(Measurement)


class EngineEvidence(Settings):
    """One engine's share of a batch."""

    loss: float
    """Of the tokens that it sampled."""
    loss_of_others: float
    """Of all other tokens."""
    start: int = 0
    """Which start of the engine is announced (pipeline.data.membership)."""


class Evidence(Settings):
    """What one trained batch shows. The ESS is that of the learner before the step against the engines."""

    step: int
    loss: float
    """-ln of the batch's token ESS."""
    age: float = 0.0
    """Mean optimizer steps between the sampling of a token and the step that trains on it."""
    engines: Mapping[int, EngineEvidence] = {}
    """By index, where the batch says which engine sampled, and where there are two or more."""
    in_transition: bool = False
    """Whether an earlier decision has not reached all engines yet."""
    quantization: float | None = None
    """Loss of the learner against itself with the present map emulated, on tokens of the batch; None: not measured."""
    groups: Mapping[str, float] | None = None
    """The same for each quantizable group as the only one that is quantized; None: not measured."""
    unmeasurable: bool = False
    """Whether the learner cannot emulate the engines' formats."""

    @property
    def ess(self) -> float:
        return math.exp(-self.loss)


class Failure(Settings):
    """What was tried and failed: a rung that was given back too early, an engine that was started again, a climb."""

    times: int
    retry_at: int
    """The first step at which it may be tried again."""


class Trial(Settings):
    """What was given back, and may be needed."""

    cause: Cause
    until: int
    """The last step at which a climb back means that it failed."""


class Climb(Settings):
    """Rungs against staleness that were climbed one after another, and have not reached the floor so far. Losses are
    medians of the window."""

    rung: int
    """The one that was in force before."""
    loss: float
    """With that one, nats."""
    reached: float | None = None
    """With them, once they were given back as in vain; until then None."""


class Observation(Settings):
    """A batch in the window of the controller."""

    loss: float
    engines: Mapping[int, EngineEvidence] = {}


class State(Settings):
    """Where on the ladder a run is, and what the controller remembers. The first step begins with the defaults."""

    staleness: int = 0
    """Rungs in use against staleness (Ladder.staleness)."""
    climb: Climb | None = None
    """The latest, while it is not known yet whether it helps."""
    promoted: tuple[str, ...] = ()
    """Groups that the engines hold unquantized by decision, in the order in which they were promoted."""
    quant_map: int = 0
    """Number of the quant map in force; 0 is the recipe's. It grows with every decision that changes `promoted`."""
    acted: int | None = None
    """Step of the last decision."""
    quiet_until: int = 0
    """The first step whose batch shows what the last decision did."""
    window: tuple[Observation, ...] = ()
    """The latest batches since then; in a staged run, of whole stages."""
    measured: Mapping[Measurement, int] = {}
    """The step at which each measurement was last made, or found to be impossible."""
    trials: Mapping[str, Trial] = {}
    """By rung or group: what was given back a short while ago, the latest last."""
    failures: Mapping[str, Failure] = {}
    """By rung or group: what was given back too early; and climbs against staleness that were in vain."""
    suspects: Mapping[int, Failure] = {}
    """By engine: those that were started again because they alone were bad."""
    cannot_help: bool = False
    """Whether the ESS is below the floor and no rung is left that could raise it."""


class Decision(Settings):
    """One change, and why."""

    action: Literal["climb", "descend", "restart_engine"]
    cause: Cause
    rung: str
    """In words, as `Ladder.rungs_of` names it; of an engine: `engine 3`."""
    groups: tuple[str, ...] = ()
    """Promoted now, or quantized again."""
    engine: int | None = None
    engine_start: int | None = None
    """Which start of the engine is bad: a later one is not meant."""
    because: str = Field(min_length=1)
    """One sentence with the numbers."""


class Outcome(Settings):
    """What follows from a batch."""

    state: State
    decision: Decision | None = None
    needs: Measurement | None = None
    """Measure this and ask again; `state` is then the one before."""
    groups: tuple[str, ...] = ()
    """Those that `Evidence.groups` is needed for."""


class ControllerSettings(Settings):
    """Keeps the token ESS of the batches above a floor. Without this section nothing is controlled.

    What quantization does is measured by emulating the engines' formats in the learner. Transformer Engine layers, the
    usual ones on GPUs, cannot emulate them. There either cause may be all of it: first staleness is lowered
    rung by rung, then all layers are promoted at once. They are given back at once too.
    """

    ess_floor: float = Field(0.95, gt=0.0, lt=1.0, description="Lowest token ESS of a batch that is accepted.")
    cooldown_steps: PositiveInt = Field(
        5, description="Steps between two decisions, at least; in a staged run, whole stages that hold them."
    )
    headroom: float = Field(
        0.3,
        gt=0.0,
        lt=1.0,
        description="Share of the allowed loss -ln(ess_floor) that must be free before a rung is given back.",
    )
    evidence_tokens: PositiveInt = Field(
        4096,
        description="Sampled tokens of a batch that are scored again, behind their prompts, to see what quantization "
        "does to them. No sample gives more than a sixteenth of them: of a longer response it is the beginning.",
    )

    @property
    def allowed_loss(self) -> float:
        """-ln of the floor, nats."""
        return -math.log(self.ess_floor)

    @property
    def comfortable_loss(self) -> float:
        """The loss below which there is the headroom to come down, nats."""
        return (1.0 - self.headroom) * self.allowed_loss
