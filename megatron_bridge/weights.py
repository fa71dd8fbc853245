"""Convert HF safetensors ⇄ Megatron-Core parameters: both directions walk the parameters and move slices of `name_map`.

Loading needs no communication: every rank reads its own slices, one parameter at a time. Exporting gathers one
parameter at a time over the ranks that share it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_bridge.hf.headers import check_weights
from megatron_bridge.hf.model_config import MEGATRON_ENDS, MEGATRON_EXPERT, MEGATRON_LAYER, ModelConfig
from megatron_bridge.hf.tensor_files import TensorFolder
from megatron_bridge.parallel.rank_sync import all_gather_json, all_gather_single
from pipeline.errors import ModelError
from precision.formats.rollout_format import qkv_rows


def load_hf(chunks: Sequence[Any], config: ModelConfig, folder: Path) -> None:
    """Copy this rank's share of an HF folder into its model chunks, cast to their dtype. Raises ModelError naming every
    tensor that is missing, unexpected or misshaped, before anything is copied."""
    check_weights(folder, config)
    tensors, names, coords = TensorFolder(folder), name_map(config), ShardCoords.here()
    with torch.no_grad():
        for name, parameter in parameter_names(chunks, names):
            row = 0
            for held in names.slices(name, coords):
                height = held.size[0]
                if height:  # a rank may hold nothing but padding of the vocabulary
                    parameter.narrow(0, row, height).copy_(tensors.slice(held.name, held.index))
                row += height
            parameter[row:] = 0.0  # padding of the vocabulary


def load_named(chunks: Sequence[Any], config: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy this rank's share of whole HF tensors, each as it arrives, into its model chunks; no tensor is kept. The
    tensors may be made from `export_hf` of the same chunks: it does not read a parameter's rows again after it has
    yielded their tensor. Raises ValueError naming a tensor that never arrived."""
    names, coords = name_map(config), ShardCoords.here()
    wanted: dict[str, list[tuple[Tensor, TensorSlice]]] = {}
    for name, parameter in parameter_names(chunks, names):
        row = 0
        for tensor_slice in names.slices(name, coords):
            height = tensor_slice.size[0]
            wanted.setdefault(tensor_slice.name, []).append((parameter.detach().narrow(0, row, height), tensor_slice))
            row += height
        parameter.detach()[row:] = 0.0  # padding of the vocabulary
    for name, tensor in tensors:
        for part, tensor_slice in wanted.pop(name, ()):
            part.copy_(tensor[tensor_slice.index])
    if wanted:
        raise ValueError(f"{len(wanted)} tensors never came, the first {min(wanted)}; give every tensor of the model")


def export_hf(chunks: Sequence[Any], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield every HF tensor of the whole model by name, in the model's dtype. Collective: every rank must exhaust it.
    Chunks may be wrapped (DDP). The tensors may share memory with the parameters: copy a tensor to keep it."""
    names, coords = name_map(config), ShardCoords.here()
    own = dict(parameter_names(chunks, names))
    group = parallel_state.get_pipeline_model_parallel_group()
    device = next(iter(own.values())).device
    here = dist.get_rank(group)
    listed = [(name, str(parameter.dtype).removeprefix("torch.")) for name, parameter in own.items()]
    for stage, entries in enumerate(all_gather_json(listed, group, device)):
        for name, dtype in entries:
            shard = (
                own[name].detach()
                if stage == here
                else torch.empty(names.size(name, coords), dtype=getattr(torch, dtype), device=device)
            )
            if dist.get_world_size(group) > 1:
                dist.broadcast(shard, src=dist.get_global_rank(group, stage), group=group)
            yield from _whole_tensors(names, name, shard, coords)


def export_stage(chunks: Sequence[Any], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield every whole HF tensor of this rank's pipeline stage by name, in the model's dtype and in the same order on
    every rank of the stage. Tied embeddings come from the first stage only. Collective over the ranks of the stage,
    which must all exhaust it; stages do not wait for one another. Tensors may share memory with the parameters: copy to
    keep."""
    names, coords = name_map(config), ShardCoords.here()
    for name, parameter in parameter_names(chunks, names):
        yield from _whole_tensors(names, name, parameter.detach(), coords)


def stage_tensors(chunks: Sequence[Any], config: ModelConfig) -> list[str]:
    """Return the names that `export_stage` yields, in order. No communication."""
    names, coords = name_map(config), ShardCoords.here()
    listed = [
        tensor_slice.name
        for name, _ in parameter_names(chunks, names)
        if not (name == OUTPUT_LAYER and config.tied_embeddings)
        for other in _sharing(names, name, coords)
        for tensor_slice in names.slices(name, other)
    ]
    return list(dict.fromkeys(listed))


def _whole_tensors(names: NameMap, name: str, shard: Tensor, coords: ShardCoords) -> Iterator[tuple[str, Tensor]]:
    """Yield the HF tensors of a parameter, gathered over the ranks of the stage that share it."""
    if name == OUTPUT_LAYER and names.config.tied_embeddings:
        return  # it repeats the embedding of the first stage
    slices = [names.slices(name, other) for other in _sharing(names, name, coords)]
    shards: Iterable[Tensor]
    if slices.count(slices[0]) == len(slices):
        slices, shards = slices[:1], [shard]
    elif names.is_expert(name):
        shards = gather_shards(shard, parallel_state.get_expert_tensor_and_model_parallel_group())
    else:
        shards = gather_shards(shard, parallel_state.get_tensor_model_parallel_group())
        if names.is_vocabulary(name):  # gathered, it is whole, and followed by its padding
            yield slices[0][0].name, shards.flatten(0, 1)[: names.config.vocab_size]
            return
    yield from join_slices(names, slices, shards).items()


def join_slices(names: NameMap, slices: Sequence[Sequence[TensorSlice]], shards: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the whole HF tensors by name; shard i is the stack of `slices[i]`. Tensors whole in a shard are views."""
    whole: dict[str, Tensor] = {}
    for held, tensor in zip(slices, shards, strict=True):
        row = 0
        for tensor_slice in held:
            part = tensor.narrow(0, row, tensor_slice.size[0])
            row += tensor_slice.size[0]
            if tensor_slice.size == names.tensors[tensor_slice.name]:
                whole[tensor_slice.name] = part
            else:
                if tensor_slice.name not in whole:
                    whole[tensor_slice.name] = part.new_empty(names.tensors[tensor_slice.name])
                whole[tensor_slice.name][tensor_slice.index] = part
    return whole


def _sharing(names: NameMap, name: str, coords: ShardCoords) -> list[ShardCoords]:
    """Return the coordinates of the ranks that the parameter is gathered over, in the group's order."""
    if names.is_expert(name):
        # Megatron numbers expert tensor parallel ranks first, then expert parallel ones.
        return [
            ShardCoords(
                expert_rank=rank // coords.expert_tensor_size,
                expert_size=coords.expert_size,
                expert_tensor_rank=rank % coords.expert_tensor_size,
                expert_tensor_size=coords.expert_tensor_size,
            )
            for rank in range(coords.expert_size * coords.expert_tensor_size)
        ]
    return [ShardCoords(tensor_rank=rank, tensor_size=coords.tensor_size) for rank in range(coords.tensor_size)]


def gather_shards(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return every rank's shard [ranks, *shard], in the group's order. Collective."""
    num_ranks = dist.get_world_size(group)
    shards = shard.new_empty(num_ranks * shard.shape[0], *shard.shape[1:])
    all_gather_single(shards, shard.contiguous(), group=group)
    return shards.view(num_ranks, *shard.shape)


_LAYER_NAMES = {name: hf_names for names, hf_names in MEGATRON_LAYER for name in names}
_GROUPED_EXPERT = re.compile(r".*\.mlp\.experts\.(linear_fc[12]\.weight)(\d+)")
_SINGLE_EXPERT = re.compile(r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12]\.weight)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")

OUTPUT_LAYER = "output_layer.weight"


@dataclass(frozen=True, kw_only=True)
class ShardCoords:
    """A rank's position in, and the size of, each group that splits parameters: they determine its slices."""

    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor_rank: int = 0
    expert_tensor_size: int = 1

    @staticmethod
    def here() -> ShardCoords:
        """Return this process's coordinates in Megatron's parallel state."""
        return ShardCoords(
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
            expert_rank=parallel_state.get_expert_model_parallel_rank(),
            expert_size=parallel_state.get_expert_model_parallel_world_size(),
            expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
            expert_tensor_size=parallel_state.get_expert_tensor_parallel_world_size(),
        )


@dataclass(frozen=True)
class TensorSlice:
    """Part of a Hugging Face tensor: rows [start, stop) × columns [start, stop); `columns` is None for a vector."""

    name: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None

    size: tuple[int, ...] = field(init=False, compare=False)
    """Shape of the slice: (rows,) or (rows, columns)."""
    index: tuple[slice, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        spans = [self.rows] if self.columns is None else [self.rows, self.columns]
        object.__setattr__(self, "size", tuple(stop - start for start, stop in spans))
        object.__setattr__(self, "index", tuple(slice(*span) for span in spans))


@cache
def name_map(config: ModelConfig) -> NameMap:
    return NameMap(config)


class NameMap:
    """The map of Megatron parameters ⇄ Hugging Face tensors of one model. Parameters go by their *stage name*, the same
    on every rank of a pipeline stage: Megatron's name with the layer counted over the whole model, the expert counted
    from the rank's first, and experts named as in TE's grouped linears,
    `decoder.layers.7.mlp.experts.linear_fc1.weight3`."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.tensors = config.tensors()
        self._slices: dict[tuple[str, ShardCoords], tuple[TensorSlice, ...]] = {}

    def stage_name(self, parameter: str, layers: Sequence[int]) -> str:
        """Return the stage name of a parameter in a chunk that holds these `layers`, counted from 0."""
        single = _SINGLE_EXPERT.fullmatch(parameter)
        if single:
            parameter = f"{single[1]}.{single[3]}{single[2]}"
        if layer := _LAYER.match(parameter):
            parameter = f"decoder.layers.{layers[int(layer[1])]}.{parameter[layer.end() :]}"
        return parameter

    def is_expert(self, stage_name: str) -> bool:
        """Return whether the parameter belongs to one expert, so that expert parallel ranks hold different ones."""
        return _GROUPED_EXPERT.fullmatch(stage_name) is not None

    def is_vocabulary(self, stage_name: str) -> bool:
        """Return whether the parameter's rows are tokens, of which the last rank's may be padding."""
        return stage_name.startswith(("embedding.", "output_layer."))

    def slices(self, stage_name: str, coords: ShardCoords) -> tuple[TensorSlice, ...]:
        """Return the slices that the rank at `coords` holds under this name, in the order of their rows. Raises
        ModelError for a parameter that has no Hugging Face counterpart in this model."""
        if (known := self._slices.get((stage_name, coords))) is not None:
            return known
        config, expert = self.config, _GROUPED_EXPERT.fullmatch(stage_name)
        names, shown = tuple[str, ...](), stage_name
        rank, size = coords.tensor_rank, coords.tensor_size
        if stage_name == OUTPUT_LAYER and config.tied_embeddings:
            names = ("model.embed_tokens.weight",)
        elif stage_name in MEGATRON_ENDS:
            names = (MEGATRON_ENDS[stage_name],)
        elif (layer := _LAYER.match(stage_name)) is not None:
            if expert is not None and config.experts is not None:
                rank, size = coords.expert_tensor_rank, coords.expert_tensor_size
                number = config.experts.count // coords.expert_size * coords.expert_rank + int(expert[2])
                names = tuple(f"mlp.experts.{number}.{name}" for name in MEGATRON_EXPERT[expert[1]])
                shown = f"{stage_name.removesuffix(expert[2])}{number}"
            else:
                names = _LAYER_NAMES.get(stage_name[layer.end() :], ())
            names = tuple(f"model.layers.{layer[1]}.{name}" for name in names)
        if not names or any(name not in self.tensors for name in names):
            raise ModelError(
                f"Megatron parameter {shown} has no counterpart among the Hugging Face tensors of "
                f"{config.architecture} ({', '.join(names) or 'unknown name'}); expected one for each; build the "
                "model from the same config.json"
            )
        found = list[TensorSlice]()
        if ".linear_qkv." in stage_name and "layer_norm" not in stage_name:
            groups = config.num_kv_heads // size
            rows = qkv_rows(config.num_heads // config.num_kv_heads, 1, config.head_dim)
            for group in range(rank * groups, (rank + 1) * groups):
                for name, count in zip(names, rows, strict=True):
                    found.append(self._slice(name, (group * count, (group + 1) * count)))
        elif self.is_vocabulary(stage_name):
            height = self.size(stage_name, coords)[0]
            start, stop = (min(at, config.vocab_size) for at in (rank * height, (rank + 1) * height))
            found += [self._slice(name, (start, stop)) for name in names]
        else:
            axis = 1 if stage_name.endswith(".linear_proj.weight") or ".linear_fc2.weight" in stage_name else 0
            if axis == 0 and ".linear_fc1.weight" not in stage_name:
                rank, size = 0, 1  # every rank holds it whole
            for name in names:
                share = self.tensors[name][axis] // size
                found.append(self._slice(name, (rank * share, (rank + 1) * share), axis))
        self._slices[stage_name, coords] = tuple(found)
        return self._slices[stage_name, coords]

    def size(self, stage_name: str, coords: ShardCoords) -> tuple[int, ...]:
        """Return the parameter's shape at `coords`, which for the vocabulary may have more rows than the slice."""
        if self.is_vocabulary(stage_name):
            return self.config.vocabulary_rows(coords.tensor_size) // coords.tensor_size, self.config.hidden_size
        slices = self.slices(stage_name, coords)
        return (sum(tensor_slice.size[0] for tensor_slice in slices), *slices[0].size[1:])

    def _slice(self, name: str, span: tuple[int, int], axis: int = 0) -> TensorSlice:
        """Return the part of a tensor that is `span` along one axis and whole along the other."""
        spans = [(0, length) for length in self.tensors[name]]
        spans[axis] = span
        return TensorSlice(name, spans[0], spans[1] if len(spans) > 1 else None)


def parameter_names(chunks: Iterable[Any], names: NameMap) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (stage name, parameter) for every parameter of a rank's model chunks, wrapped or not, in order."""
    for chunk in chunks:
        while hasattr(chunk, "module"):  # DDP
            chunk = chunk.module
        layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]  # over the whole model, from 0
        for name, parameter in chunk.named_parameters():
            yield names.stage_name(name, layers), parameter
