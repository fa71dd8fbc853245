"""The learner with other weights for a while: another version's, or its own with a fault made in them on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_bridge.step.fp8_emulation import weights_changed
from megatron_bridge.weights.convert import load_named

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner

NamedTensors = Iterator[tuple[str, Tensor]]


@contextmanager
def changed(learner: MegatronLearner, change: Callable[[NamedTensors], NamedTensors]) -> Iterator[None]:
    """Score with `change(learner.named_weights())`; weights are restored bit by bit at the end. Collective.

    Every rank holds its share twice meanwhile, and of the whole model the tensor that is being changed. For `logprobs`
    and `score_tokens` only: an update inside would be lost. Formats that are emulated inside
    (megatron_bridge.step.fp8_emulation) are those of the changed weights.
    """
    chunks = [chunk.module for chunk in learner.model]
    saved = [(parameter, parameter.detach().clone()) for chunk in chunks for parameter in chunk.parameters()]
    try:
        load_named(chunks, learner.model_config, change(learner.named_weights()))
        weights_changed(learner.emulation)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)
        weights_changed(learner.emulation)


def scaled(module: str, factor: float) -> Callable[[NamedTensors], NamedTensors]:
    """A change: the weights of `module`, and of all below it, times `factor`. Norms are left as they are."""

    def change(tensors: NamedTensors) -> NamedTensors:
        for name, tensor in tensors:
            inside = name.removesuffix(".weight") == module or name.startswith(f"{module}.")
            yield name, tensor * factor if inside and tensor.dim() > 1 else tensor

    return change


def rounded(module: str, dtype: torch.dtype) -> Callable[[NamedTensors], NamedTensors]:
    """A change: the weights of `module` as a coarser `dtype` holds them."""

    def change(tensors: NamedTensors) -> NamedTensors:
        for name, tensor in tensors:
            yield name, tensor.to(dtype).to(tensor.dtype) if name == f"{module}.weight" else tensor

    return change
