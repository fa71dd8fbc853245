"""HF folder → FP8 HF folder that stock SGLang loads, in bounded memory: no model is built, no tensor is read whole.

    block128  <module>.weight e4m3 [N, K], <module>.weight_scale_inv f32 [⌈N/128⌉, ⌈K/128⌉]
    tensor    <module>.weight e4m3 [N, K], <module>.weight_scale f32 scalar; what the engine stacks (q, k and v; gate
              and up) shares its scale, so that the stacked matrix needs none but that one

Dequantised values are weight × scale in both. Activations are quantized by the engine (`activation_scheme: dynamic`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from megatron_bridge.hf.safetensors_stream import PIECE_BYTES, TensorFolder, TensorSpec
from megatron_bridge.hf.streaming_writer import Manifest, complete_folder, write_weights
from megatron_bridge.hf.writer import SHARD_BYTES
from precision.formats.formats import BLOCK, E4M3, RolloutFormat, dequantize_block, quantize_block, scale_of, to_e4m3
from precision.formats.quant_map import QuantMap

Group = list[TensorSpec]


def write_fp8_folder(
    source: Path,
    folder: Path,
    quant: QuantMap,
    *,
    advance: Callable[[int], None],
    shard_bytes: int = SHARD_BYTES,
    piece_bytes: int = PIECE_BYTES,
) -> Manifest:
    """Fill `folder` with the quantized model; returns its manifest. `advance` is told the bytes that were written.

    Memory: a few times `piece_bytes` (or one row of 128 × the widest matrix, if that is more), whatever the model's
    size. Raises FloatingPointError naming a weight that is not finite.
    """
    config = read_hf_config(source)
    shape = ModelConfig.from_hf(config)
    tensors = TensorFolder(source)
    quantizer = _Quantizer(tensors, quant, piece_bytes)
    order = [name for name in shape.tensors()]
    groups = [quantizer.outputs(name) for name in order]
    pieces = (piece for name in order for piece in quantizer.pieces(name))
    manifest = write_weights(folder, groups, pieces, advance=advance, shard_bytes=shard_bytes)
    config = {key: value for key, value in config.items() if key != "torch_dtype"}
    dtype = manifest["model.norm.weight"]["dtype"]
    complete_folder(folder, source, config | {"dtype": dtype, **quantization_config(quant)}, manifest)
    return manifest


def quantization_config(quant: QuantMap) -> dict[str, Any]:
    """`{"quantization_config": …}` of a folder whose weights are stored as e4m3."""
    stored = quant.to_hf_quantization_config()
    if stored is None:  # fp8_tensor: as an engine's input plain weights, here stored
        stored = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
        stored["ignored_layers"] = ["lm_head"]
    return {"quantization_config": stored}


def output_bytes(source: Path, quant: QuantMap) -> int:
    """Bytes of all tensors of the result."""
    tensors = TensorFolder(source)
    quantizer = _Quantizer(tensors, quant, PIECE_BYTES)
    names = ModelConfig.from_hf(read_hf_config(source)).tensors()
    return sum(spec.nbytes for name in names for spec in quantizer.outputs(name))


def dequantized_tensors(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The values that a folder of either layout stands for, one HF weight at a time."""
    tensors = TensorFolder(folder)
    for name, spec in tensors.specs.items():
        module = name.removesuffix(".weight")
        if spec.dtype is not E4M3:
            if not name.endswith(("weight_scale", "weight_scale_inv")):
                yield name, tensors.whole(name).to(dtype)
        elif f"{module}.weight_scale_inv" in tensors.specs:
            scale = tensors.whole(f"{module}.weight_scale_inv")
            yield name, dequantize_block(tensors.whole(name), scale, BLOCK).to(dtype)
        else:
            yield name, (tensors.whole(name).float() * tensors.whole(f"{module}.weight_scale")).to(dtype)


class _Quantizer:
    """What becomes of each tensor of the source."""

    def __init__(self, tensors: TensorFolder, quant: QuantMap, piece_bytes: int) -> None:
        self._tensors = tensors
        self._quant = quant
        self._piece_bytes = piece_bytes
        self._groups = {module: group for group in quant.fused_groups for module in group}
        self._scales: dict[tuple[str, ...], Tensor] = {}

    def outputs(self, name: str) -> Group:
        """The tensors that `name` becomes, in the order in which `pieces` yields them."""
        spec = self._tensors.specs[name]
        rollout_format = self._format(name)
        if rollout_format is None:
            return [spec]
        module = name.removesuffix(".weight")
        weight = TensorSpec(name, spec.shape, E4M3)
        if rollout_format is RolloutFormat.FP8_TENSOR:
            return [weight, TensorSpec(f"{module}.weight_scale", (), torch.float32)]
        blocks = tuple(-(-size // block) for size, block in zip(spec.shape, BLOCK, strict=True))
        return [weight, TensorSpec(f"{module}.weight_scale_inv", blocks, torch.float32)]

    def pieces(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The values of `outputs(name)`, piece by piece."""
        rollout_format = self._format(name)
        module = name.removesuffix(".weight")
        if rollout_format is None:
            for piece in self._tensors.pieces(name, piece_bytes=self._piece_bytes):
                yield name, piece
        elif rollout_format is RolloutFormat.FP8_TENSOR:
            scale = self._shared_scale(self._groups[module])
            for piece in self._tensors.pieces(name, piece_bytes=self._piece_bytes):
                yield name, to_e4m3(piece.float() / scale)
            yield f"{module}.weight_scale", scale
        else:
            for piece in self._tensors.pieces(name, BLOCK[0], self._piece_bytes):
                try:
                    quantized, scale_inv = quantize_block(piece)
                except FloatingPointError as error:
                    raise FloatingPointError(f"{name}: {error}") from error
                yield name, quantized
                yield f"{module}.weight_scale_inv", scale_inv

    def _format(self, name: str) -> RolloutFormat | None:
        return self._quant.formats.get(name.removesuffix(".weight")) if name.endswith(".weight") else None

    def _shared_scale(self, group: tuple[str, ...]) -> Tensor:
        """float32 scalar for all modules of a stacked matrix: a first pass over their weights."""
        if group not in self._scales:
            amax = torch.zeros(())
            for module in group:
                for piece in self._tensors.pieces(f"{module}.weight", piece_bytes=self._piece_bytes):
                    amax = torch.maximum(amax, piece.abs().amax().float())
            try:
                self._scales = {group: scale_of(amax)}  # groups come one after another: one is enough
            except FloatingPointError as error:
                raise FloatingPointError(f"{group[0]}.weight: {error}") from error
        return self._scales[group]
