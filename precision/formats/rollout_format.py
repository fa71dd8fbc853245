"""Define the formats in which linear layers are served, and the matrices that engines stack. Needs no torch."""

from __future__ import annotations

from enum import StrEnum

BLOCK = (128, 128)
"""Rows and columns that share a weight scale in fp8_block."""
ACTIVATION_GROUP = 128
"""Channels of a token that share an activation scale in fp8_block."""
MX_GROUP = 32
"""Columns of a row, or channels of a token, that share a scale in mxfp8 and emulated_mxfp4 (OCP Microscaling 1.0)."""
NV_GROUP = 16
"""Columns of a row, or channels of a token, that share an e4m3 scale in emulated_nvfp4."""
EMULATED_METHOD = "evenkeel_emulated"
"""The `quant_method` in the config.json of a policy in an emulated format; unknown to stock SGLang."""


class RolloutFormat(StrEnum):
    """A format in which an engine stores and multiplies a linear layer. Values of the first four are e4m3.

        fp8_tensor: one weight scale for each matrix the engine multiplies by, one activation scale a token.
        fp8_block: one weight scale a 128x128 block, one activation scale a token and 128 channels.
        fp8_channel: one weight scale a row, one activation scale a token; SGLang's variant of fp8_tensor on a GPU.
        mxfp8: one power-of-two scale a row and 32 columns of the weight, and a token and 32 channels of the activation.

        emulated_fp6: e3m2 values; one weight scale for each matrix of the checkpoint, one activation scale a token.
        emulated_fp4: the same with e2m1 values.
        emulated_nvfp4: e2m1 values; an e4m3 scale for 16 columns of a row, times one float32 scale for each matrix of
        the checkpoint; for activations, for 16 channels, times one a token.
        emulated_mxfp4: as mxfp8, with e2m1 values.

    A recipe can ask engines for fp8_block; on CPUs also for fp8_tensor, over which a GPU cannot load the next version,
    and for the emulated formats, which stress learning and have no GPU path. fp8_channel and mxfp8 exist in the learner
    only.
    """

    FP8_TENSOR = "fp8_tensor"
    FP8_BLOCK = "fp8_block"
    FP8_CHANNEL = "fp8_channel"
    MXFP8 = "mxfp8"
    EMULATED_FP6 = "emulated_fp6"
    EMULATED_FP4 = "emulated_fp4"
    EMULATED_NVFP4 = "emulated_nvfp4"
    EMULATED_MXFP4 = "emulated_mxfp4"

    @property
    def is_served(self) -> bool:
        """Whether a recipe can ask engines for the format (rollout.precision), on CPUs at least."""
        return self not in (RolloutFormat.FP8_CHANNEL, RolloutFormat.MXFP8)

    @property
    def is_emulated(self) -> bool:
        """Whether only CPU engines have the format, by emulation. The learner sends the rounded values."""
        return self.value.startswith("emulated_")

    @property
    def activation_group(self) -> int | None:
        """Channels whose rounding depends on no others; None: all channels of a token."""
        return {
            RolloutFormat.FP8_BLOCK: ACTIVATION_GROUP,
            RolloutFormat.MXFP8: MX_GROUP,
            RolloutFormat.EMULATED_MXFP4: MX_GROUP,
        }.get(self)

    @classmethod
    def named(cls, name: RolloutFormat | str) -> RolloutFormat:
        """Return the format of that name. Raises ValueError for an unknown name."""
        try:
            return cls(name)
        except ValueError:
            raise ValueError(f"unknown rollout format {name!r}, expected one of {', '.join(cls)}") from None


STACKS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Name of the stacked matrix in an engine → its parts, by Hugging Face name, in the order of their rows."""


def qkv_rows(num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Return the rows of q, k and v, of a whole layer or of any share of its heads. An engine stacks all of q, then k,
    then v. Megatron stacks, for each key/value head in turn, the query heads that share it, its key and its value: with
    `num_kv_heads` 1 the result is for such a group."""
    return num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim
