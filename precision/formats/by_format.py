"""What each format makes of weights and of activations: from the name of a format to the function that rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from precision.formats.formats import (
    fake_quantize_activation,
    fake_quantize_block,
    fake_quantize_channel,
    fake_quantize_mxfp8,
)
from precision.formats.rollout_format import ACTIVATION_GROUP, RolloutFormat
from precision.formats.small_floats import (
    E2M1,
    E3M2,
    fake_quantize_matrix,
    fake_quantize_mxfp4,
    fake_quantize_nvfp4_matrix,
    fake_quantize_nvfp4_tokens,
    fake_quantize_tokens,
)

Rounding = Callable[[Tensor], Tensor]

FAKE_QUANTIZE: Mapping[RolloutFormat, Rounding] = {
    RolloutFormat.FP8_BLOCK: fake_quantize_block,
    RolloutFormat.FP8_CHANNEL: fake_quantize_channel,
    RolloutFormat.MXFP8: fake_quantize_mxfp8,
    RolloutFormat.EMULATED_FP6: partial(fake_quantize_matrix, kind=E3M2),
    RolloutFormat.EMULATED_FP4: partial(fake_quantize_matrix, kind=E2M1),
    RolloutFormat.EMULATED_NVFP4: fake_quantize_nvfp4_matrix,
    RolloutFormat.EMULATED_MXFP4: fake_quantize_mxfp4,
}
"""Of a weight [out, in], for the formats in which each matrix is quantized for itself, stacked or not: all but
fp8_tensor."""

_ACTIVATIONS: Mapping[RolloutFormat, Rounding] = {
    RolloutFormat.FP8_TENSOR: fake_quantize_activation,
    RolloutFormat.FP8_BLOCK: partial(fake_quantize_activation, group=ACTIVATION_GROUP),
    RolloutFormat.FP8_CHANNEL: fake_quantize_activation,
    RolloutFormat.MXFP8: fake_quantize_mxfp8,
    RolloutFormat.EMULATED_FP6: partial(fake_quantize_tokens, kind=E3M2),
    RolloutFormat.EMULATED_FP4: partial(fake_quantize_tokens, kind=E2M1),
    RolloutFormat.EMULATED_NVFP4: fake_quantize_nvfp4_tokens,
    RolloutFormat.EMULATED_MXFP4: fake_quantize_mxfp4,
}


def fake_quantize_activation_as(activation: Tensor, rollout_format: RolloutFormat) -> Tensor:
    """`activation` [..., channels] as the matrix product of an engine with that format sees it, same dtype. Raises
    FloatingPointError on non-finite input."""
    return _ACTIVATIONS[rollout_format](activation)
