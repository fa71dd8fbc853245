"""The rollout's FP8 in the learner, emulated, for scoring: what would the learner say with the engine's formats?

Weights are replaced by the values that e4m3 and its scales can hold, inputs of the quantized linears by theirs: one
scale a token (fp8_tensor) or a token and 128 channels (fp8_block), over the whole input dimension, whatever the tensor
parallel size. Products stay in the learner's precision. Only for Megatron's own layers: Transformer Engine fuses the
norm into the linear, so that its input is not what is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from megatron_bridge.model import uses_transformer_engine
from megatron_bridge.weights import load_named
from pipeline.errors import ModelError
from precision.formats import RolloutFormat
from precision.quant_map import QuantMap, fake_quantize_state

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner

_LINEARS = {
    "self_attention.linear_qkv": "self_attn.q_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "mlp.linear_fc1": "mlp.gate_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}
"""Megatron's linear → an HF module that goes into it; the others in it share its format (QuantMap's fused groups)."""


@contextmanager
def emulated(learner: MegatronLearner, quant_map: QuantMap) -> Iterator[None]:
    """Score as an engine with these formats would; weights are restored bit by bit at the end. Collective.

    For `token_logprobs` and `score_tokens` only: an update inside would be lost. Raises ModelError with TE layers,
    FloatingPointError for weights or activations that are not finite.
    """
    if uses_transformer_engine():
        raise ModelError("FP8 emulation needs Megatron's own layers, but the model is built from Transformer Engine's")
    chunks = [chunk.module for chunk in learner.model]
    saved = [(parameter, parameter.detach().clone()) for chunk in chunks for parameter in chunk.parameters()]
    hooks: list[Any] = []
    try:
        tensors = dict(fake_quantize_state(learner.named_weights(), quant_map))
        load_named(chunks, learner.shape, tensors)
        hooks += [
            linear.register_forward_pre_hook(_quantize_input(rollout_format))
            for chunk in chunks
            for linear, rollout_format in _quantized_linears(chunk, quant_map)
        ]
        yield
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)


def _quantized_linears(chunk: Any, quant_map: QuantMap) -> Iterator[tuple[Any, RolloutFormat]]:
    for layer in chunk.decoder.layers:
        for ours, theirs in _LINEARS.items():
            rollout_format = quant_map.formats.get(f"model.layers.{layer.layer_number - 1}.{theirs}")
            if rollout_format is not None:
                yield layer.get_submodule(ours), rollout_format


def _quantize_input(rollout_format: RolloutFormat) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]:
    def quantize(linear: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden: Tensor = inputs[0]  # [sequence, batch, channels]
        split = isinstance(linear, RowParallelLinear)  # channels are divided over the tensor parallel ranks
        whole = gather_from_tensor_model_parallel_region(hidden) if split else hidden
        quantized = rollout_format.fake_quantize_activation(whole)
        if split:
            rank = parallel_state.get_tensor_model_parallel_rank()
            quantized = quantized.narrow(-1, rank * hidden.shape[-1], hidden.shape[-1]).contiguous()
        return (quantized, *inputs[1:])

    return quantize
