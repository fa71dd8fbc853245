"""The rollout's formats in the learner, emulated: what the learner computes when its linears round as the engine's do.

    weights       the values that the format and its scales can hold, made once for each state of the weights (an
                  optimizer step, not a micro-batch), in copies that take the parameters' place during a pass
    activations   inputs of the quantized linears, rounded in every pass: one scale a token (fp8_tensor, emulated_fp6,
                  emulated_fp4) or a token and some channels (fp8_block: 128; emulated_mxfp4: 32; emulated_nvfp4: 16),
                  over the whole input dimension, whatever the tensor parallel size

Gradients pass straight through both roundings (Bengio et al. 2013, arXiv 1308.3432): with y = Q(x) Q(W)ᵀ, the gradient
of x is g Q(W), that of W is gᵀ Q(x), and the optimizer changes the weights as they are, unrounded. Products stay in the
learner's precision. Only for Megatron's own layers, on a GPU too: Transformer Engine fuses the norm into the linear, so
that its input is not what is quantized.

Megatron multiplies an expert's activation by its router weight before the last linear, engines after it: with one scale
a token (or a token and 128 channels) that is the same up to rounding, as the weight passes into the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.model.te_precision import Layers
from megatron_bridge.parallel.rank_sync import exhausted
from megatron_bridge.weights import (
    NameMap,
    ShardCoords,
    TensorSlice,
    gather_shards,
    join_slices,
    layers_of,
    parameter_names,
)
from pipeline.config.recipe import LearnerSection
from pipeline.errors import ModelError, NonFiniteError
from precision.formats.formats import fake_quantize, straight_through
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import RolloutFormat
from precision.formats.streams import fake_quantize_state

_WEIGHT = ".weight"
_TE = (
    "FP8 emulation needs Megatron's own layers, but the model is built from Transformer Engine's; "
    'use MegatronLearner.create(..., layers="megatron")'
)


class Emulating(Protocol):
    """A learner whose passes run under `emulation`, where it has one."""

    emulation: Fp8Emulation | None
    layers: Any
    model: list[Any]
    model_config: ModelConfig


def require_emulation(section: LearnerSection, layers: Layers | None, quant_map: QuantMap | None) -> None:
    """Raises ModelError for layers that cannot be emulated, ValueError unless a map is given exactly where the recipe
    asks for the emulation."""
    if section.fp8_emulation != (quant_map is not None):
        raise ValueError(
            f"learner.fp8_emulation is {str(section.fp8_emulation).lower()}, but the learner was given "
            f"{'no' if quant_map is None else 'a'} quant map; pass build_quant_map(recipe) exactly where it is true"
        )
    if quant_map is not None and layers == "transformer_engine":
        raise ModelError(_TE)


@contextmanager
def emulated(learner: Emulating, quant_map: QuantMap | None) -> Iterator[None]:
    """Score (and train) with these formats emulated, or with none, instead of what the learner emulates otherwise.

    Collective. Weights themselves never change. Raises ModelError with TE layers. Passes inside raise NonFiniteError
    for weights that are not finite.
    """
    usual = learner.emulation
    learner.emulation = None if quant_map is None else Fp8Emulation.of(learner, quant_map)
    try:
        yield
    finally:
        learner.emulation = usual


def emulating(emulation: Fp8Emulation | None) -> AbstractContextManager[None]:
    """Run passes under an emulation, where there is one."""
    return nullcontext() if emulation is None else emulation.applied()


def weights_changed(emulation: Fp8Emulation | None) -> None:
    """Tell an emulation, where there is one, that the optimizer or a checkpoint has changed the weights."""
    if emulation is not None:
        emulation.forget()


@dataclass
class _Linear:
    """A quantized linear of this rank and the copy that takes its weight's place."""

    module: Any
    format: RolloutFormat
    stage_name: str
    slices: tuple[TensorSlice, ...]
    """Of which its weight is the stack."""
    other: Tensor = field(init=False)
    """Between passes the rounded weight, within them the weight as it is."""

    def __post_init__(self) -> None:
        self.other = torch.empty_like(self.module.weight.data)

    @property
    def hf_modules(self) -> list[str]:
        return [held.name.removesuffix(_WEIGHT) for held in self.slices]

    def fill(self, name: str, tensor: Tensor) -> None:
        """Copy this rank's slices of a whole tensor to their places."""
        row = 0
        for held in self.slices:
            if held.name == name:
                self.other.narrow(0, row, held.size[0]).copy_(tensor[held.index])
            row += held.size[0]


class Fp8Emulation:
    """The formats of a quant map in the linears of one rank's model."""

    def __init__(self, model: Sequence[Any], config: ModelConfig, quant_map: QuantMap) -> None:
        """`model`: this rank's chunks as DDP wraps them. Raises ModelError for modules of the map that are no linears
        of this model."""
        self.quant_map = quant_map
        self._names, self._coords = NameMap(config), ShardCoords.here()
        self._linears = [linear for chunk in model for linear in self._quantized(chunk.module)]
        self._share = quant_map.restricted(module for linear in self._linears for module in linear.hf_modules)
        self._check(model)
        self._made_from: list[int] | None = None
        """Versions of the weights that the copies were made from."""

    @staticmethod
    def of(learner: Emulating, quant_map: QuantMap) -> Fp8Emulation:
        """The emulation of a map in this learner. Raises ModelError with layers that cannot be emulated."""
        if learner.layers != "megatron":
            raise ModelError(_TE)
        return Fp8Emulation(learner.model, learner.model_config, quant_map)

    def forget(self) -> None:
        """The weights are others now: round them anew before the next pass. In-place changes that autograd counts are
        noticed without this; those of Megatron's optimizer are not."""
        self._made_from = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run passes under the emulation; the parameters are what they were at the end. Collective.

        Raises NonFiniteError, on every rank, for weights that are not finite. Activations that are not come out as NaN.
        """
        self._refresh()
        hooks = [linear.module.register_forward_pre_hook(_quantize_input(linear.format)) for linear in self._linears]
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
            for hook in hooks:
                hook.remove()

    def _quantized(self, chunk: Any) -> Iterator[_Linear]:
        layers = layers_of(chunk)
        for path, module in chunk.named_modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.weight is not None:
                name = self._names.stage_name(f"{path}.weight", layers)
                slices = self._names.slices(name, self._coords)
                # The first of the HF modules in it stands for all: the engine stacks them too, in one format.
                rollout_format = self.quant_map.formats.get(slices[0].name.removesuffix(_WEIGHT))
                if rollout_format is not None:
                    yield _Linear(module, rollout_format, name, slices)

    def _check(self, model: Sequence[Any]) -> None:
        unknown = {f"{module}{_WEIGHT}" for module in self.quant_map.formats} - self._names.tensors.keys()
        here = (held for name, _ in parameter_names(model, self._names) for held in self._slices(name))
        unknown |= {held.name for held in here if held.name.removesuffix(_WEIGHT) in self.quant_map.formats} - {
            f"{module}{_WEIGHT}" for module in self._share.formats
        }
        if unknown:
            raise ModelError(
                f"the quant map names {min(unknown).removesuffix(_WEIGHT)}, which is no linear layer of this "
                f"{self._names.config.architecture}; compare its module names with the model's config.json"
            )

    def _slices(self, stage_name: str) -> tuple[TensorSlice, ...]:
        return self._names.slices(stage_name, self._coords)

    def _exchange(self) -> None:
        for linear in self._linears:
            linear.module.weight.data, linear.other = linear.other, linear.module.weight.data

    @torch.no_grad()
    def _refresh(self) -> None:
        """Round the weights anew if they have changed. Collective when they have."""
        versions = [linear.module.weight._version for linear in self._linears]
        if versions == self._made_from:
            return
        targets = {held.name: linear for linear in self._linears for held in linear.slices}
        error, whole = "", self._whole_weights()
        with exhausted(whole):
            try:
                for name, tensor in fake_quantize_state(whole, self._share):
                    targets[name].fill(name, tensor)
            except FloatingPointError as found:
                error = str(found)
        self._agree(error)
        self._made_from = versions

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """HF tensors of this rank's linears, whole: scales are those of whole tensors. Gathered one after another over
        the ranks that share a linear."""
        for linear in self._linears:
            group, weight = linear.module.tp_group, linear.module.weight.detach()
            shards = gather_shards(weight, group) if group.size() > 1 else [weight]
            slices = [self._names.slices(linear.stage_name, self._at(linear, rank)) for rank in range(len(shards))]
            yield from join_slices(self._names, slices, shards).items()

    def _at(self, linear: _Linear, rank: int) -> ShardCoords:
        if self._names.is_expert(linear.stage_name):
            return replace(self._coords, expert_tensor_rank=rank)
        return replace(self._coords, tensor_rank=rank)

    def _agree(self, error: str) -> None:
        """The ranks that share a linear fail alike, but the others must hear of it. All gathers are over by then: ranks
        that share one linear need not share the next, which may be an expert."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        failed = torch.tensor(float(bool(error)), device=device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if failed.item():
            raise NonFiniteError(
                f"{error or 'a weight that another rank holds is not finite'}; nothing was computed. Go back to the "
                "last checkpoint, and lower learner.optimizer.lr"
            )


def _quantize_input(rollout_format: RolloutFormat) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]:
    def quantize(linear: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden: Tensor = inputs[0]  # [sequence, batch, channels], or [tokens, channels] of an expert
        if hidden.numel() == 0:  # an expert that no token chose; its tensor parallel ranks agree on that
            return inputs
        try:
            quantized = _rounded(linear, hidden.detach(), rollout_format)
        except FloatingPointError:
            # Raised in one rank alone it would leave the others in a collective. NaN reaches the loss, which all check.
            quantized = torch.full_like(hidden, torch.nan)
        return (straight_through(hidden, quantized), *inputs[1:])

    return quantize


def _rounded(linear: Any, hidden: Tensor, rollout_format: RolloutFormat) -> Tensor:
    # Channels are divided over the (expert) tensor parallel ranks; whole groups of them need nobody else.
    width, group = hidden.shape[-1], rollout_format.activation_group
    split = isinstance(linear, RowParallelLinear) and linear.tp_group.size() > 1
    if not split or (group is not None and width % group == 0):
        return fake_quantize(hidden, rollout_format, per_token=True)
    whole = gather_from_tensor_model_parallel_region(hidden, group=linear.tp_group)
    quantized = fake_quantize(whole, rollout_format, per_token=True)
    return quantized.narrow(-1, linear.tp_group.rank() * width, width).contiguous()
