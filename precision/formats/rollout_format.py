"""Names of the formats that linear layers are served in. Needs no torch."""

from __future__ import annotations

from enum import StrEnum

BLOCK = (128, 128)
"""Rows and columns that share a weight scale in fp8_block."""
ACTIVATION_GROUP = 128
"""Channels of a token that share an activation scale in fp8_block."""


class RolloutFormat(StrEnum):
    """How an engine stores and multiplies a linear layer.

    fp8_tensor: one weight scale for each matrix the engine multiplies by, one activation scale a token.
    fp8_block: one weight scale a 128x128 block, one activation scale a token and 128 channels.
    """

    FP8_TENSOR = "fp8_tensor"
    FP8_BLOCK = "fp8_block"

    @property
    def activation_group(self) -> int | None:
        """Channels that share an activation scale; None: all channels of a token."""
        return ACTIVATION_GROUP if self is RolloutFormat.FP8_BLOCK else None

    @classmethod
    def named(cls, name: RolloutFormat | str) -> RolloutFormat:
        """Raises ValueError for an unknown name."""
        try:
            return cls(name)
        except ValueError:
            raise ValueError(f"unknown rollout format {name!r}, expected one of {', '.join(cls)}") from None
