"""The quant map: which module of the model is held in which format, by exact Hugging Face name.

One map serves both sides. `quantize_state` makes the tensors that the engine is given. `fake_quantize_state` makes the
weights that the engine then computes with, for the learner's emulation of it. Both work on streams. At the end both
check that every module of the map came: one that did not would be served in another format than the map says.

Engines stack q, k and v, and gate and up, into one matrix each. Block scales stay the same (the rows of each part are a
multiple of 128, as SGLang requires of stacked parts). With fp8_tensor the stacked matrix has a single scale, so the
members of a fused group share their largest magnitude. That holds for an engine of tensor parallel size 1; a sharded
engine has a scale for each shard. Each expert of a mixture is stacked by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from precision.formats.formats import (
    BLOCK,
    RolloutFormat,
    fake_quantize_block,
    fake_quantize_tensor,
    quantize_block,
    scale_of,
)
from precision.formats.stacks import STACKS

FUSED_ATTENTION = (tuple(f"self_attn.{part}" for part in STACKS["qkv_proj"]), ("self_attn.o_proj",))
FUSED_MLP = (STACKS["gate_up_proj"], ("down_proj",))
"""The linear layers of a Qwen3, Qwen2 or Llama decoder layer, grouped as engines stack them; `FUSED_MLP` is below `mlp`
in dense layers, below `mlp.experts.N` in a mixture."""

_WEIGHT = ".weight"

BlockQuantizer = Callable[[Tensor], tuple[Tensor, Tensor]]
"""An implementation of `precision.formats.formats.quantize_block` for 128x128 blocks, the same bit for bit."""


@dataclass(frozen=True)
class QuantMap:
    """Formats by module name, such as `model.layers.0.self_attn.q_proj`; a module not named here is not quantized."""

    formats: Mapping[str, RolloutFormat]
    fused_groups: tuple[tuple[str, ...], ...]
    """Modules that the engine stacks, every quantized module in exactly one group."""

    def __post_init__(self) -> None:
        grouped = sorted(module for group in self.fused_groups for module in group)
        if grouped != sorted(self.formats):
            odd = sorted(set(grouped) ^ set(self.formats)) or grouped
            raise ValueError(f"fused groups and formats name different modules: {odd[:4]}; give each exactly one group")
        for group in self.fused_groups:
            if len({self.formats[module] for module in group}) > 1:
                raise ValueError(f"{', '.join(group)} are stacked by the engine but differ in format; give them one")

    @classmethod
    def for_decoder(
        cls, num_layers: int, rollout_format: RolloutFormat | str, num_experts: int | None = None
    ) -> QuantMap:
        """All attention and MLP projections of a decoder; embeddings, norms, routers and lm_head stay as they are.

        With `num_experts`, the MLP of every layer is a mixture of so many. Raises ValueError for an unknown format, no
        layers or no experts.
        """
        if num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}, expected at least 1; read it from the model's config.json")
        if num_experts is not None and num_experts < 1:
            raise ValueError(f"num_experts is {num_experts}, expected at least 1, or None for a dense model")
        parts = ["mlp"] if num_experts is None else [f"mlp.experts.{expert}" for expert in range(num_experts)]
        layer_groups = list(FUSED_ATTENTION)
        layer_groups += [tuple(f"{part}.{projection}" for projection in group) for part in parts for group in FUSED_MLP]
        groups = tuple(
            tuple(f"model.layers.{layer}.{projection}" for projection in group)
            for layer in range(num_layers)
            for group in layer_groups
        )
        chosen = _format(rollout_format)
        return cls(formats={module: chosen for group in groups for module in group}, fused_groups=groups)

    def restricted(self, modules: Iterable[str]) -> QuantMap:
        """The map of a share of the model, such as one pipeline stage; unquantized modules may be named as well.

        The audit of `quantize_state` and `fake_quantize_state` then demands this share, all of it and no more. Raises
        ValueError when the share cuts through a group that the engine stacks.
        """
        share = self.formats.keys() & set(modules)
        groups = tuple(group for group in self.fused_groups if not share.isdisjoint(group))
        for group in groups:
            if not share.issuperset(group):
                raise ValueError(
                    f"{', '.join(group)} are stacked by the engine, but the share has only "
                    f"{', '.join(sorted(share & set(group)))}; keep them together"
                )
        return QuantMap({module: self.formats[module] for group in groups for module in group}, groups)

    def to_hf_quantization_config(self) -> dict[str, Any] | None:
        """`quantization_config` for config.json, next to what `quantize_state` yields.

        None for fp8_tensor: the folder holds plain weights, and SGLang quantizes them on loading (--quantization fp8).
        Raises ValueError when the map mixes formats, which no such config can say.
        """
        if len(set(self.formats.values())) > 1:
            raise ValueError("the map mixes formats, one quantization_config knows a single one; use one format")
        if RolloutFormat.FP8_TENSOR in self.formats.values():
            return None
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": list(BLOCK),
        }


def quantize_state(
    named_tensors: Iterable[tuple[str, Tensor]], quant_map: QuantMap, quantizer: BlockQuantizer = quantize_block
) -> Iterator[tuple[str, Tensor]]:
    """Stream HF (name, tensor) pairs into what the engine loads, in the same order.

    fp8_block modules yield `<module>.weight` (e4m3) and `<module>.weight_scale_inv` (f32); everything else, fp8_tensor
    weights included, passes unchanged. Raises FloatingPointError naming a non-finite weight, ValueError at the end when
    a module of the map never came.
    """
    missing = set(quant_map.formats)
    for name, tensor in named_tensors:
        module = name.removesuffix(_WEIGHT)
        if name.endswith(_WEIGHT):
            missing.discard(module)
        if name.endswith(_WEIGHT) and quant_map.formats.get(module) is RolloutFormat.FP8_BLOCK:
            with _naming(name):
                quantized, scale_inv = quantizer(tensor)
            yield name, quantized
            yield f"{module}.weight_scale_inv", scale_inv
        else:
            yield name, tensor
    _require_all(missing)


def fake_quantize_state(
    named_tensors: Iterable[tuple[str, Tensor]], quant_map: QuantMap
) -> Iterator[tuple[str, Tensor]]:
    """Stream HF (name, tensor) pairs into the values that the engine computes with, each in its own dtype.

    Pass tensors in the dtype that the engine loads. Members of a fused fp8_tensor group are held back until the group
    is whole; all else keeps its order. Raises as `quantize_state`.
    """
    groups = {module: group for group in quant_map.fused_groups for module in group}
    waiting: dict[str, Tensor] = {}
    missing = set(quant_map.formats)
    for name, tensor in named_tensors:
        module = name.removesuffix(_WEIGHT)
        rollout_format = quant_map.formats.get(module) if name.endswith(_WEIGHT) else None
        if rollout_format is None:
            yield name, tensor
            continue
        missing.discard(module)
        if rollout_format is RolloutFormat.FP8_BLOCK:
            with _naming(name):
                quantized = fake_quantize_block(tensor)
            yield name, quantized
            continue
        waiting[module] = tensor
        if all(member in waiting for member in groups[module]):
            yield from _fake_quantize_group({member: waiting.pop(member) for member in groups[module]})
    _require_all(missing)


def _fake_quantize_group(group: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    amaxes = []
    for module, tensor in group.items():
        amaxes.append(tensor.detach().abs().amax().float())
        with _naming(module + _WEIGHT):
            scale_of(amaxes[-1])
    shared = torch.stack(amaxes).amax()
    for module, tensor in group.items():
        yield module + _WEIGHT, fake_quantize_tensor(tensor, shared)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"{name}: {error}") from error


def _require_all(missing: set[str]) -> None:
    if missing:
        raise ValueError(
            f"{len(missing)} modules of the quant map had no weight, the first {min(missing)}; expected a weight for "
            "each; compare num_layers and the module names with the model"
        )


def _format(rollout_format: RolloutFormat | str) -> RolloutFormat:
    try:
        return RolloutFormat(rollout_format)
    except ValueError:
        known = ", ".join(RolloutFormat)
        raise ValueError(f"unknown rollout format {rollout_format!r}, expected one of {known}") from None
