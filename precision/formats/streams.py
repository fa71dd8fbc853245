"""Convert streams of (Hugging Face name, tensor) to the formats of a quant map.

`quantize_state` makes the tensors for the engine, and `fake_quantize_state` the weights that the engine then computes
with, for the learner's emulation. At the end both check that every module of the map came: a missing module would be
served in another format than the map says.

Block scales do not depend on stacking (the rows of each part are a multiple of 128, as SGLang requires of stacked
parts). With fp8_tensor the stacked matrix has a single scale, so the members of a fused group share their largest
magnitude. That holds for an engine of tensor parallel size 1; a sharded engine has a scale per shard. Each expert of a
mixture is stacked by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from precision.formats import formats
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import RolloutFormat


def quantize_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `weight` [N, K] in 128x128 blocks on its device: by a kernel on a GPU, with the same bits as
    `precision.formats.formats.quantize_block`."""
    if not weight.is_cuda:
        return formats.quantize_block(weight)
    from precision.formats import quantize_triton  # only where there is Triton

    return quantize_triton.quantize_block(weight)


def quantize_state(named_tensors: Iterable[tuple[str, Tensor]], quant_map: QuantMap) -> Iterator[tuple[str, Tensor]]:
    """Stream HF (name, tensor) pairs into the engine's tensors, in the same order.

    fp8_block modules yield `<module>.weight` (e4m3) and `<module>.weight_scale_inv` (f32), modules of an emulated
    format the rounded values in the weight's dtype; all others, fp8_tensor weights included, pass unchanged. Raises
    FloatingPointError naming a non-finite weight, ValueError for a format that engines are not sent, and at the end
    when a module of the map never came.
    """
    for rollout_format in sorted(set(quant_map.formats.values())):
        if not rollout_format.is_served:
            raise ValueError(f"{rollout_format} is emulated by the learner only; send engines fp8_block or fp8_tensor")
    for name, tensor, chosen in _with_formats(named_tensors, quant_map):
        try:
            if chosen is RolloutFormat.FP8_BLOCK:
                tensor, scale_inv = quantize_block(tensor)
            elif chosen is not None and chosen.is_emulated:
                tensor = formats.fake_quantize(tensor, chosen)
        except FloatingPointError as error:
            raise FloatingPointError(f"{name}: {error}") from error
        yield name, tensor
        if chosen is RolloutFormat.FP8_BLOCK:
            yield f"{name}_scale_inv", scale_inv


def fake_quantize_state(
    named_tensors: Iterable[tuple[str, Tensor]], quant_map: QuantMap
) -> Iterator[tuple[str, Tensor]]:
    """Stream HF (name, tensor) pairs into the values that the engine computes with, each in its dtype. Pass tensors in
    the dtype that the engine loads. Members of a fused fp8_tensor group wait until the group is complete; all others
    keep their order. Raises as `quantize_state`."""
    waiting: dict[str, tuple[Tensor, Tensor]] = {}
    for name, tensor, rollout_format in _with_formats(named_tensors, quant_map):
        if rollout_format is None:
            yield name, tensor
            continue
        try:
            if rollout_format is RolloutFormat.FP8_TENSOR:
                amax = tensor.detach().abs().amax().float()
                formats.require_finite(amax)
                waiting[name] = tensor, amax
            else:
                tensor = formats.fake_quantize(tensor, rollout_format)
        except FloatingPointError as error:
            raise FloatingPointError(f"{name}: {error}") from error
        if rollout_format is not RolloutFormat.FP8_TENSOR:
            yield name, tensor
            continue
        group = quant_map.weights[name][0]
        if waiting.keys() >= set(group):
            whole = {member: waiting.pop(member) for member in group}
            shared = torch.stack([amax for _, amax in whole.values()]).amax()
            for member, (part, _) in whole.items():
                yield member, formats.fake_quantize(part, rollout_format, amax=shared)


def _with_formats(
    named_tensors: Iterable[tuple[str, Tensor]], quant_map: QuantMap
) -> Iterator[tuple[str, Tensor, RolloutFormat | None]]:
    """Yield each tensor with the format that the map gives it. Raises ValueError at the end for a missing module."""
    missing = set(quant_map.weights)
    for name, tensor in named_tensors:
        missing.discard(name)
        yield name, tensor, quant_map.weights.get(name, ((), None))[1]
    if missing:
        raise ValueError(
            f"{len(missing)} modules of the quant map had no weight, the first {min(missing).removesuffix('.weight')}; "
            "expected a weight for each; compare num_layers and the module names with the model"
        )
