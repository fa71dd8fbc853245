"""What a recipe says about the controller."""

from __future__ import annotations

import math

from pydantic import Field, PositiveInt

from precision.settings import Settings


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

    @property
    def clear_loss(self) -> float:
        """As far above the allowed loss as the comfortable one is below, nats. From there on, what a rung does can be
        told from the noise of batches."""
        return (1.0 + self.headroom) * self.allowed_loss
