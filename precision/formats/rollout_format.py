"""Names of the formats that linear layers are served in. Needs no torch."""

from __future__ import annotations

from enum import StrEnum

BLOCK = (128, 128)
"""Rows and columns that share a weight scale in fp8_block."""
ACTIVATION_GROUP = 128
"""Channels of a token that share an activation scale in fp8_block."""
MX_GROUP = 32
"""Columns of a row, or channels of a token, that share a scale in mxfp8 (OCP Microscaling Formats 1.0)."""


class RolloutFormat(StrEnum):
    """How an engine stores and multiplies a linear layer. Values are e4m3.

    fp8_tensor: one weight scale for each matrix the engine multiplies by, one activation scale a token.
    fp8_block: one weight scale a 128x128 block, one activation scale a token and 128 channels.
    fp8_channel: one weight scale a row, one activation scale a token; what SGLang makes of fp8_tensor on a GPU.
    mxfp8: one scale, a power of two, a row and 32 columns of the weight, and a token and 32 channels of the activation.

    A recipe can ask engines for the first two. The others are emulated by the learner.
    """

    FP8_TENSOR = "fp8_tensor"
    FP8_BLOCK = "fp8_block"
    FP8_CHANNEL = "fp8_channel"
    MXFP8 = "mxfp8"

    @property
    def is_served(self) -> bool:
        """Whether a recipe can ask engines for it (rollout.precision)."""
        return self in (RolloutFormat.FP8_TENSOR, RolloutFormat.FP8_BLOCK)

    @property
    def activation_group(self) -> int | None:
        """Channels that share an activation scale; None: all channels of a token."""
        return {RolloutFormat.FP8_BLOCK: ACTIVATION_GROUP, RolloutFormat.MXFP8: MX_GROUP}.get(self)

    @classmethod
    def named(cls, name: RolloutFormat | str) -> RolloutFormat:
        """Raises ValueError for an unknown name."""
        try:
            return cls(name)
        except ValueError:
            raise ValueError(f"unknown rollout format {name!r}, expected one of {', '.join(cls)}") from None
