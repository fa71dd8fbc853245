"""The rollout's FP8 in the learner, emulated, for scoring: what would the learner say with the engine's formats?

Weights are replaced by the values that e4m3 and its scales can hold, inputs of the quantized linears by theirs: one
scale a token (fp8_tensor) or a token and 128 channels (fp8_block), over the whole input dimension, whatever the tensor
parallel size. Products stay in the learner's precision. Only for Megatron's own layers, on a GPU too: Transformer
Engine fuses the norm into the linear, so that its input is not what is quantized.

Megatron multiplies an expert's activation by its router weight before the last linear, engines after it: with one scale
a token (or a token and 128 channels) that is the same up to rounding, as the weight passes into the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from megatron_bridge.weights.convert import load_named
from megatron_bridge.weights.name_map import NameMap, ShardCoords, layers_of
from pipeline.errors import ModelError
from precision.formats.formats import fake_quantize_activation_as
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import RolloutFormat
from precision.formats.streams import fake_quantize_state

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner


@contextmanager
def emulated(learner: MegatronLearner, quant_map: QuantMap) -> Iterator[None]:
    """Score as an engine with these formats would; weights are restored bit by bit at the end. Collective.

    For `logprobs` and `score_tokens` only: an update inside would be lost. Raises ModelError with TE layers,
    FloatingPointError for weights or activations that are not finite.
    """
    if learner.layers != "megatron":
        raise ModelError(
            "FP8 emulation needs Megatron's own layers, but the model is built from Transformer Engine's; "
            'score with MegatronLearner.create(..., layers="megatron")'
        )
    chunks = [chunk.module for chunk in learner.model]
    saved = [(parameter, parameter.detach().clone()) for chunk in chunks for parameter in chunk.parameters()]
    hooks: list[Any] = []
    try:
        tensors = dict(fake_quantize_state(learner.named_weights(), quant_map))
        load_named(chunks, learner.model_config, tensors)
        hooks += [
            linear.register_forward_pre_hook(_quantize_input(rollout_format))
            for chunk in chunks
            for linear, rollout_format in _quantized_linears(chunk, NameMap(learner.model_config), quant_map)
        ]
        yield
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)


def _quantized_linears(chunk: Any, names: NameMap, quant_map: QuantMap) -> Iterator[tuple[Any, RolloutFormat]]:
    coords, layers = ShardCoords.here(), layers_of(chunk)
    for path, module in chunk.named_modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.weight is not None:
            # The first of the HF modules in it stands for all: the engine stacks them too, in one format.
            first = names.slices(names.stage_name(f"{path}.weight", layers), coords)[0].name
            rollout_format = quant_map.formats.get(first.removesuffix(".weight"))
            if rollout_format is not None:
                yield module, rollout_format


def _quantize_input(rollout_format: RolloutFormat) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]:
    def quantize(linear: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden: Tensor = inputs[0]  # [sequence, batch, channels], or [tokens, channels] of an expert
        if hidden.numel() == 0:  # an expert that no token chose; its tensor parallel ranks agree on that
            return inputs
        # Channels are divided over the (expert) tensor parallel ranks.
        split = isinstance(linear, RowParallelLinear) and linear.tp_group.size() > 1
        whole = gather_from_tensor_model_parallel_region(hidden, group=linear.tp_group) if split else hidden
        quantized = fake_quantize_activation_as(whole, rollout_format)
        if split:
            start = linear.tp_group.rank() * hidden.shape[-1]
            quantized = quantized.narrow(-1, start, hidden.shape[-1]).contiguous()
        return (quantized, *inputs[1:])

    return quantize
