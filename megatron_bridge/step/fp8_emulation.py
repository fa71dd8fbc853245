"""Emulate the rollout's formats in the learner: its linears round as the engine's do.

    weights       the values that the format and its scales can hold, made once for each state of the weights (an
                  optimizer step, not a micro-batch), in copies that take the parameters' place during a pass
    activations   inputs of the quantized linears, rounded in every pass: one scale a token (fp8_tensor, emulated_fp6,
                  emulated_fp4) or a token and some channels (fp8_block: 128; emulated_mxfp4: 32; emulated_nvfp4: 16),
                  over the whole input dimension, whatever the tensor parallel size

Gradients pass straight through both roundings (Bengio et al. 2013, arXiv 1308.3432): with y = Q(x) Q(W)ᵀ, the gradient
of x is g Q(W), that of W is gᵀ Q(x), and the optimizer updates the unrounded weights. Products stay in the learner's
precision. The emulation needs Megatron's own layers, on a GPU too: Transformer Engine fuses the norm into the linear,
so the linear's input is not the quantized tensor.

Megatron multiplies an expert's activation by its router weight before the last linear, engines after it. With one scale
a token (or a token and 128 channels) both agree up to rounding, because the router weight becomes part of the scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from megatron_bridge.weights import ShardCoords, TensorSlice, gather_shards, join_slices, name_map, parameter_names
from pipeline.errors import ModelError, NonFiniteError
from precision.formats.formats import fake_quantize, straight_through
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import RolloutFormat
from precision.formats.streams import fake_quantize_state

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner

_WEIGHT = ".weight"
TE_LAYERS = (
    "FP8 emulation needs Megatron's own layers, but the model is built from Transformer Engine's; "
    'use MegatronLearner.create(..., layers="megatron")'
)


@contextmanager
def emulated(learner: MegatronLearner, quant_map: QuantMap | None) -> Iterator[None]:
    """Score and train with the formats of `quant_map` emulated (None: with none) instead of the learner's usual
    emulation. Collective. The weights do not change. Raises ModelError with TE layers. Passes inside raise
    NonFiniteError for weights that are not finite."""
    usual = learner.emulation
    learner.emulation = None if quant_map is None else Fp8Emulation(learner, quant_map)
    try:
        yield
    finally:
        learner.emulation = usual


def weights_changed(emulation: Fp8Emulation | None) -> None:
    """Mark the emulation's rounded weights as outdated after the optimizer or a checkpoint has changed the weights."""
    if emulation is not None:
        emulation.forget()


@dataclass
class _Linear:
    """A quantized linear of this rank and the second copy of its weight."""

    module: Any
    format: RolloutFormat
    stage_name: str
    slices: tuple[TensorSlice, ...]
    """The HF tensors' slices that are stacked to the linear's weight."""
    other: Tensor
    """The rounded weight between passes, the original weight during a pass."""


class Fp8Emulation:
    """The formats of a quant map in the linears of one rank's model."""

    def __init__(self, learner: MegatronLearner, quant_map: QuantMap) -> None:
        """Raise ModelError for layers without emulation, and for modules of the map that are not linears."""
        if learner.layers != "megatron":
            raise ModelError(TE_LAYERS)
        self.quant_map = quant_map
        self._names, self._coords = name_map(learner.model_config), ShardCoords.here()
        self._linears = list[_Linear]()
        self._made_from: list[int] | None = None
        """The weights' autograd versions when the copies were rounded."""
        formats, quantized = quant_map.formats, set[str]()
        wanted = {f"{module}{_WEIGHT}" for module in formats}
        unknown = wanted - self._names.tensors.keys()
        linears = dict[int, Any]()
        for chunk in learner.model:
            for module in chunk.modules():
                if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.weight is not None:
                    linears[id(module.weight)] = module
        for stage_name, parameter in parameter_names(learner.model, self._names):
            slices = self._names.slices(stage_name, self._coords)
            held = {part.name for part in slices}
            # The first HF module stands for all modules of the stack: the engine stacks them too, in one format.
            rollout_format = formats.get(slices[0].name.removesuffix(_WEIGHT))
            if id(parameter) in linears and rollout_format is not None:
                other = torch.empty_like(parameter.data)
                self._linears.append(_Linear(linears[id(parameter)], rollout_format, stage_name, slices, other))
                quantized |= {name.removesuffix(_WEIGHT) for name in held}
            else:
                unknown |= held & wanted
        if unknown:
            raise ModelError(
                f"the quant map names {min(unknown).removesuffix(_WEIGHT)}, which is no linear layer of this "
                f"{self._names.config.architecture}; compare its module names with the model's config.json"
            )
        self._share = quant_map.restricted(quantized)

    def forget(self) -> None:
        """Round the weights again before the next pass: autograd does not count the changes of Megatron's optimizer."""
        self._made_from = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run passes under the emulation; the parameters are restored at the end. Collective. Raises NonFiniteError, on
        every rank, for weights that are not finite. Activations that are not finite become NaN."""
        self._refresh()
        hooks = []
        for linear in self._linears:
            module = linear.module
            hooks.append(module.register_forward_pre_hook(partial(quantize_input, linear.format)))
            module.weight.data, linear.other = linear.other, module.weight.data
        try:
            yield
        finally:
            for linear in self._linears:
                linear.module.weight.data, linear.other = linear.other, linear.module.weight.data
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _refresh(self) -> None:
        """Round the weights again if they have changed. Collective if they have."""
        versions = [linear.module.weight._version for linear in self._linears]
        if versions == self._made_from:
            return
        targets = dict[str, _Linear]()
        for linear in self._linears:
            targets |= dict.fromkeys([held.name for held in linear.slices], linear)
        error, whole = "", self._whole_weights()
        try:
            for name, tensor in fake_quantize_state(whole, self._share):
                row = 0
                for held in targets[name].slices:
                    if held.name == name:
                        targets[name].other.narrow(0, row, held.size[0]).copy_(tensor[held.index])
                    row += held.size[0]
        except FloatingPointError as found:
            error = str(found)
        finally:
            for _ in whole:  # this rank must take part in all gathers, also after an error
                pass
        # Ranks that share a linear fail alike, but the other ranks must learn of it. The exchange waits until all
        # gathers are over, because ranks that share one linear need not share the next, which may be an expert.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        failed = torch.tensor(float(bool(error)), device=device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if failed.item():
            raise NonFiniteError(
                f"{error or 'a weight that another rank holds is not finite'}; nothing was computed. Go back to the "
                "last checkpoint, and lower learner.optimizer.lr"
            )
        self._made_from = versions

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's linears as whole HF tensors (as scales are), gathered over the ranks that share them."""
        for linear in self._linears:
            group, weight = linear.module.tp_group, linear.module.weight.detach()
            shards = gather_shards(weight, group) if group.size() > 1 else weight[None]
            which = "expert_tensor_rank" if self._names.is_expert(linear.stage_name) else "tensor_rank"
            held_by = [replace(self._coords, **{which: rank}) for rank in range(len(shards))]
            slices = [self._names.slices(linear.stage_name, coords) for coords in held_by]
            yield from join_slices(self._names, slices, shards).items()


def quantize_input(rollout_format: RolloutFormat, linear: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Round the first of a linear's `inputs` (a forward pre-hook)."""
    hidden: Tensor = inputs[0]  # [sequence, batch, channels], or [tokens, channels] of an expert
    if hidden.numel() == 0:  # an expert that no token chose, on all its tensor parallel ranks alike
        return inputs
    # Tensor parallel ranks split the channels of row-parallel inputs; a rank with whole scale groups needs no gather.
    whole, width, group = hidden.detach(), hidden.shape[-1], rollout_format.activation_group
    split = isinstance(linear, RowParallelLinear) and linear.tp_group.size() > 1
    if split and (group is None or width % group):
        whole = gather_from_tensor_model_parallel_region(whole, group=linear.tp_group)
    try:
        quantized = fake_quantize(whole, rollout_format, per_token=True)
    except FloatingPointError:
        # An error in one rank would leave the others in a collective. NaN reaches the loss, which all ranks check.
        quantized = torch.full_like(whole, torch.nan)
    if whole.shape != hidden.shape:
        quantized = quantized.narrow(-1, linear.tp_group.rank() * width, width).contiguous()
    return (straight_through(hidden, quantized), *inputs[1:])
