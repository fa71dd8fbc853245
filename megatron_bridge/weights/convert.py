"""HF safetensors ⇄ Megatron-Core parameters: both directions walk the parameters and move the slices of `name_map`.

Loading needs no communication: every rank reads its own slices, one parameter at a time. Exporting gathers one
parameter at a time over the ranks that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_bridge.hf.headers import check_weights
from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.hf.tensor_folder import TensorFolder
from megatron_bridge.parallel.rank_sync import all_gather_json
from megatron_bridge.weights.name_map import OUTPUT_LAYER, NameMap, ShardCoords, TensorSlice, parameter_names


def load_hf(chunks: Sequence[Any], config: ModelConfig, folder: Path) -> None:
    """Copy this rank's share of an HF folder into its model chunks, converting to their dtype.

    Raises ModelError naming every tensor that is missing, unexpected or of another shape, before anything is copied.
    """
    check_weights(folder, config)
    tensors = TensorFolder(folder)
    _load(chunks, config, lambda tensor_slice: tensors.slice(tensor_slice.name, tensor_slice.index))


def load_named(chunks: Sequence[Any], config: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy this rank's share of whole HF tensors, each as it comes, into its model chunks; none is kept.

    They may be made from `export_hf` of the same chunks: it reads no row of a parameter after it has yielded the tensor
    of that row. Raises ValueError naming a tensor that never came.
    """
    names, coords = NameMap(config), ShardCoords.here()
    wanted: dict[str, list[tuple[Tensor, TensorSlice]]] = {}
    for name, parameter in parameter_names(chunks, names):
        row = 0
        for tensor_slice in names.slices(name, coords):
            height = tensor_slice.size[0]
            wanted.setdefault(tensor_slice.name, []).append((parameter.detach().narrow(0, row, height), tensor_slice))
            row += height
        parameter.detach()[row:] = 0.0  # what pads a vocabulary
    for name, tensor in tensors:
        for part, tensor_slice in wanted.pop(name, ()):
            part.copy_(tensor[tensor_slice.index])
    if wanted:
        raise ValueError(f"{len(wanted)} tensors never came, the first {min(wanted)}; give every tensor of the model")


def export_hf(chunks: Sequence[Any], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor of the whole model, by name, in the model's dtype. Collective: every rank must exhaust it.

    Chunks may be wrapped (DDP). The tensors may share memory with the parameters: copy those that you keep.
    """
    names, coords = NameMap(config), ShardCoords.here()
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
                else torch.empty(names.size(name, coords), dtype=getattr(torch, dtype)).to(device)
            )
            if dist.get_world_size(group) > 1:
                dist.broadcast(shard, src=dist.get_global_rank(group, stage), group=group)
            yield from _whole_tensors(names, name, shard, coords)


def export_stage(chunks: Sequence[Any], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor of this rank's pipeline stage, whole, by name, in the model's dtype; the same sequence on every
    rank of the stage. Tied embeddings come from the first stage only.

    Collective over the ranks of the stage, which must all exhaust it; stages do not wait for one another. Tensors may
    share memory with the parameters: copy those that you keep.
    """
    names, coords = NameMap(config), ShardCoords.here()
    for name, parameter in parameter_names(chunks, names):
        yield from _whole_tensors(names, name, parameter.detach(), coords)


def stage_tensors(chunks: Sequence[Any], config: ModelConfig) -> list[str]:
    """Names of what `export_stage` will yield, in its order. No communication."""
    names, coords = NameMap(config), ShardCoords.here()
    listed = [
        tensor_slice.name
        for name, _ in parameter_names(chunks, names)
        if not _is_copy(names, name)
        for other in _sharing(names, name, coords)
        for tensor_slice in names.slices(name, other)
    ]
    return list(dict.fromkeys(listed))


def _load(chunks: Sequence[Any], config: ModelConfig, read: Callable[[TensorSlice], Tensor]) -> None:
    names, coords = NameMap(config), ShardCoords.here()
    with torch.no_grad():
        for name, parameter in parameter_names(chunks, names):
            row = 0
            for tensor_slice in names.slices(name, coords):
                height = tensor_slice.size[0]
                if height:  # of the vocabulary a rank may have nothing but padding
                    parameter.narrow(0, row, height).copy_(read(tensor_slice))
                row += height
            parameter[row:] = 0.0  # what pads a vocabulary


def _whole_tensors(names: NameMap, name: str, shard: Tensor, coords: ShardCoords) -> Iterator[tuple[str, Tensor]]:
    """The HF tensors that a parameter's shards make up, gathered over the ranks of the stage that share it."""
    if _is_copy(names, name):
        return
    slices = [names.slices(name, other) for other in _sharing(names, name, coords)]
    if len(slices) == 1 or all(held == slices[0] for held in slices):
        slices, shards = slices[:1], [shard]
    else:
        expert = names.is_expert(name)
        shards = gather_shards(
            shard,
            parallel_state.get_expert_tensor_and_model_parallel_group()
            if expert
            else parallel_state.get_tensor_model_parallel_group(),
        )
    yield from join_slices(names, slices, shards).items()


def join_slices(names: NameMap, slices: Sequence[Sequence[TensorSlice]], shards: Sequence[Tensor]) -> dict[str, Tensor]:
    """The whole HF tensors, by name, of which shard i is the stack of `slices[i]`. Views of a shard where one holds a
    tensor whole."""
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


def _is_copy(names: NameMap, name: str) -> bool:
    """Whether this parameter repeats the embedding of the first stage: the output layer of a tied model."""
    return name == OUTPUT_LAYER and names.config.tied_embeddings


def _sharing(names: NameMap, name: str, coords: ShardCoords) -> list[ShardCoords]:
    """The coordinates of the ranks that the parameter is gathered over, in their order in the group."""
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


def gather_shards(shard: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's shard, in the order of the group. Collective."""
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards
