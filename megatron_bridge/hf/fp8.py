"""Write an HF folder as an FP8 HF folder that stock SGLang loads, in bounded memory, without building a model.

    block128  <module>.weight e4m3 [N, K], <module>.weight_scale_inv f32 [⌈N/128⌉, ⌈K/128⌉]
    tensor    <module>.weight e4m3 [N, K], <module>.weight_scale f32 scalar, shared by the matrices that the engine
              stacks (q, k and v; gate and up), so that the stacked matrix needs only one scale

Dequantized values are weight × scale in both. The engine quantizes activations (`activation_scheme: dynamic`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge.hf.folders import complete_folder
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from megatron_bridge.hf.tensor_files import (
    PIECE_BYTES,
    SHARD_BYTES,
    Manifest,
    Pieces,
    TensorFolder,
    num_bytes,
    torch_dtype,
    write_shards,
)
from pipeline.ports.weights import TensorSpec
from precision.formats.formats import E4M3, dequantize_block, quantize_block, scale_of, to_e4m3
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import BLOCK, RolloutFormat

_E4M3_NAME = str(E4M3).removeprefix("torch.")


def write_fp8_folder(
    source: Path,
    folder: Path,
    quant: QuantMap,
    *,
    advance: Callable[[int], None],
    shard_bytes: int = SHARD_BYTES,
    piece_bytes: int = PIECE_BYTES,
) -> Manifest:
    """Fill `folder` with the quantized model; return its manifest. `advance` gets the number of bytes of each write.
    Memory: a few times `piece_bytes` (or 128 rows of the widest matrix, if that is more), whatever the model's size.
    Raises FloatingPointError naming a weight that is not finite."""
    hf_config = read_hf_config(source)
    quantizer = _Quantizer(TensorFolder(source), quant, piece_bytes)
    names = ModelConfig.from_hf(hf_config).tensors()
    tensors = (tensor for name in names for tensor in quantizer.tensors(name))
    manifest = write_shards(tensors, folder, shard_bytes=shard_bytes, advance=advance)
    stored = quant.to_hf_quantization_config()
    if stored is None:  # fp8_tensor: a publish gives engines plain weights, this folder holds FP8
        stored = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
        stored["ignored_layers"] = ["lm_head", *quant.ignored_layers()]
    complete_folder(folder, source, hf_config, manifest, stored)
    return manifest


def output_bytes(source: Path, quant: QuantMap) -> int:
    """Return the size of all tensors of the result."""
    quantizer = _Quantizer(TensorFolder(source), quant, PIECE_BYTES)
    names = ModelConfig.from_hf(read_hf_config(source)).tensors()
    return sum(num_bytes(spec) for name in names for spec in quantizer.outputs(name))


def dequantized_tensors(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the values that a folder of either layout represents, one HF weight at a time."""
    tensors = TensorFolder(folder)
    for name, spec in tensors.specs.items():
        module = name.removesuffix(".weight")
        if torch_dtype(spec) is not E4M3:
            if not name.endswith(("weight_scale", "weight_scale_inv")):
                yield name, tensors.whole(name).to(dtype)
        elif f"{module}.weight_scale_inv" in tensors.specs:
            scale = tensors.whole(f"{module}.weight_scale_inv")
            yield name, dequantize_block(tensors.whole(name), scale, BLOCK).to(dtype)
        else:
            yield name, (tensors.whole(name).float() * tensors.whole(f"{module}.weight_scale")).to(dtype)


class _Quantizer:
    """A plan of the output tensors of each source tensor. It reads a matrix in rows of blocks, or twice in pieces for a
    single scale; a publish has whole matrices in memory anyway (`precision.formats.streams.quantize_state`)."""

    def __init__(self, tensors: TensorFolder, quant: QuantMap, piece_bytes: int) -> None:
        self._tensors = tensors
        self._quant = quant
        self._piece_bytes = piece_bytes
        self._groups = {module: group for group in quant.fused_groups for module in group}
        self._scales: dict[tuple[str, ...], Tensor] = {}

    def outputs(self, name: str) -> list[TensorSpec]:
        """Return the specs of the tensors that `name` becomes, in the order of `tensors`."""
        spec = self._tensors.specs[name]
        rollout_format = self._format(name)
        if rollout_format is None:
            return [spec]
        weight = replace(spec, dtype=_E4M3_NAME)
        if rollout_format is RolloutFormat.FP8_TENSOR:
            return [weight, TensorSpec(name=f"{name}_scale", dtype="float32", shape=())]
        blocks = tuple(-(-size // block) for size, block in zip(spec.shape, BLOCK, strict=True))
        return [weight, TensorSpec(name=f"{name}_scale_inv", dtype="float32", shape=blocks)]

    def tensors(self, name: str) -> Iterator[Pieces]:
        """Yield the tensors that `name` becomes. Exhaust each tensor's pieces before requesting the next."""
        rollout_format = self._format(name)
        outputs = self.outputs(name)
        if rollout_format is None:
            yield outputs[0], self._tensors.pieces(name, piece_bytes=self._piece_bytes)
        elif rollout_format is RolloutFormat.FP8_TENSOR:
            group = self._groups[name.removesuffix(".weight")]
            if group not in self._scales:  # a first pass over all weights of a stacked matrix
                amax = torch.zeros(())
                for module in group:
                    for piece in self._tensors.pieces(f"{module}.weight", piece_bytes=self._piece_bytes):
                        amax = torch.maximum(amax, piece.abs().amax().float())
                try:
                    self._scales = {group: scale_of(amax)}  # groups come one after another, so one scale is kept
                except FloatingPointError as error:
                    raise FloatingPointError(f"{group[0]}.weight: {error}") from error
            scale = self._scales[group]
            pieces = self._tensors.pieces(name, piece_bytes=self._piece_bytes)
            yield outputs[0], (to_e4m3(piece.float() / scale) for piece in pieces)
            yield outputs[1], (scale,)
        else:
            # Filled in place: small tensors that outlive large ones between them would keep glibc's heap large.
            scales = torch.empty(outputs[1].shape)
            yield outputs[0], self._blocks(name, scales)
            yield outputs[1], (scales,)

    def _blocks(self, name: str, scales: Tensor) -> Iterator[Tensor]:
        """Yield the matrix in rows of blocks, as e4m3, and write their scales to `scales`."""
        row = 0
        for piece in self._tensors.pieces(name, BLOCK[0], self._piece_bytes):
            try:
                quantized, scale_inv = quantize_block(piece)
            except FloatingPointError as error:
                raise FloatingPointError(f"{name}: {error}") from error
            scales[row : row + len(scale_inv)] = scale_inv
            row += len(scale_inv)
            yield quantized

    def _format(self, name: str) -> RolloutFormat | None:
        return self._quant.formats.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
