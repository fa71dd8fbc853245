"""HF safetensors ⇄ Megatron-Core parameters: both directions walk the parameters and move the pieces of `name_map`.

Loading needs no communication: every rank reads its own rectangles, one parameter at a time. Exporting gathers one
parameter at a time over the ranks that share it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_bridge.hf.headers import check_weights
from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.hf.tensor_folder import TensorFolder
from megatron_bridge.weights.name_map import OUTPUT_LAYER, NameMap, ShardCoords, TensorSlice, parameter_names


def load_hf(chunks: Sequence[Any], shape: ModelConfig, folder: Path) -> None:
    """Copy this rank's share of an HF folder into its model chunks, converting to their dtype.

    Raises ModelError naming every tensor that is missing, unexpected or of another shape, before anything is copied.
    """
    check_weights(folder, shape)
    tensors = TensorFolder(folder)
    _load(chunks, shape, lambda piece: tensors.slice(piece.name, piece.index))


def load_named(chunks: Sequence[Any], shape: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Copy this rank's share of whole HF tensors, given by name, into its model chunks."""
    _load(chunks, shape, lambda piece: tensors[piece.name][piece.index])


def export_hf(chunks: Sequence[Any], shape: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor of the whole model, by name, in the model's dtype. Collective: every rank must exhaust it.

    Wrapped chunks (DDP) are welcome. The tensors may share memory with the parameters: copy what is kept.
    """
    names, place = NameMap(shape), ShardCoords.here()
    own = dict(parameter_names(chunks, names))
    group = parallel_state.get_pipeline_model_parallel_group()
    device = next(iter(own.values())).device
    here = dist.get_rank(group)
    for stage, listed in enumerate(_share_names(list(own.items()), group, device)):
        for name, dtype in listed:
            shard = (
                own[name].detach() if stage == here else torch.empty(names.size(name, place), dtype=dtype).to(device)
            )
            if dist.get_world_size(group) > 1:
                dist.broadcast(shard, src=dist.get_global_rank(group, stage), group=group)
            yield from _whole_tensors(names, name, shard, place)


def export_stage(chunks: Sequence[Any], shape: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor of this rank's pipeline stage, whole, by name, in the model's dtype; the same sequence on every
    rank of the stage. Tied embeddings come from the first stage only.

    Collective over the ranks of the stage, which must all exhaust it; stages do not wait for one another. Tensors may
    share memory with the parameters: copy what is kept.
    """
    names, place = NameMap(shape), ShardCoords.here()
    for name, parameter in parameter_names(chunks, names):
        yield from _whole_tensors(names, name, parameter.detach(), place)


def stage_tensors(chunks: Sequence[Any], shape: ModelConfig) -> list[str]:
    """Names of what `export_stage` will yield, in its order. No communication."""
    names, place = NameMap(shape), ShardCoords.here()
    listed = [
        piece.name
        for name, _ in parameter_names(chunks, names)
        if not _is_copy(names, name)
        for other in _sharing(names, name, place)
        for piece in names.pieces(name, other)
    ]
    return list(dict.fromkeys(listed))


def _load(chunks: Sequence[Any], shape: ModelConfig, read: Callable[[TensorSlice], Tensor]) -> None:
    names, place = NameMap(shape), ShardCoords.here()
    with torch.no_grad():
        for name, parameter in parameter_names(chunks, names):
            row = 0
            for piece in names.pieces(name, place):
                height = piece.size[0]
                parameter.narrow(0, row, height).copy_(read(piece))
                row += height


def _whole_tensors(names: NameMap, name: str, shard: Tensor, place: ShardCoords) -> Iterator[tuple[str, Tensor]]:
    """The HF tensors that a parameter's shards make up, gathered over the ranks of the stage that share it."""
    if _is_copy(names, name):
        return
    pieces = [names.pieces(name, other) for other in _sharing(names, name, place)]
    if len(pieces) == 1 or all(held == pieces[0] for held in pieces):
        pieces, shards = pieces[:1], [shard]
    else:
        expert = names.is_expert(name)
        shards = _gather(
            shard,
            parallel_state.get_expert_tensor_and_model_parallel_group()
            if expert
            else parallel_state.get_tensor_model_parallel_group(),
        )
    whole: dict[str, Tensor] = {}
    for held, tensor in zip(pieces, shards, strict=True):
        row = 0
        for piece in held:
            part = tensor.narrow(0, row, piece.size[0])
            row += piece.size[0]
            if piece.size == names.tensors[piece.name]:
                whole[piece.name] = part
            else:
                if piece.name not in whole:
                    whole[piece.name] = part.new_empty(names.tensors[piece.name])
                whole[piece.name][piece.index] = part
    yield from whole.items()


def _is_copy(names: NameMap, name: str) -> bool:
    """Whether this is the embedding of the first stage, again."""
    return name == OUTPUT_LAYER and names.shape.tied_embeddings


def _sharing(names: NameMap, name: str, place: ShardCoords) -> list[ShardCoords]:
    """The places of the group that the parameter is gathered over, in the order of its ranks."""
    if names.is_expert(name):
        # Megatron numbers expert tensor parallel ranks first, then expert parallel ones.
        return [
            ShardCoords(
                expert_rank=rank // place.expert_tensor_size,
                expert_size=place.expert_size,
                expert_tensor_rank=rank % place.expert_tensor_size,
                expert_tensor_size=place.expert_tensor_size,
            )
            for rank in range(place.expert_size * place.expert_tensor_size)
        ]
    return [ShardCoords(tensor_rank=rank, tensor_size=place.tensor_size) for rank in range(place.tensor_size)]


def _gather(shard: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def _share_names(
    own: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup, device: torch.device
) -> list[list[tuple[str, torch.dtype]]]:
    """For every pipeline stage, its parameters' stage names and dtypes. As JSON: nothing is unpickled."""
    text = json.dumps([(name, str(tensor.dtype).removeprefix("torch.")) for name, tensor in own]).encode()
    count = torch.tensor([len(text)], device=device)
    counts = _gather(count, group)
    padded = torch.zeros(int(max(counts)), dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = _gather(padded, group)
    listed = [json.loads(bytes(row[: int(n)].tolist())) for row, n in zip(texts, counts, strict=True)]
    return [[(name, getattr(torch, dtype)) for name, dtype in names] for names in listed]
