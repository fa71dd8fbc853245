"""Each data parallel rank writes and reads the share of the distributed optimizer's state that it holds.

    parameter [3, 4] as the optimizer keeps it          in the checkpoint: boxes of the tensor [3, 4]
    rank 0   ■ ■ ■ ■ ■ ■ · · · · · ·                    [0:1, 0:4] [1:2, 0:2]
    rank 1   · · · · · · ■ ■ ■ ■ ■ ■                    [1:2, 2:4] [2:3, 0:4]

A rank keeps a range of each flattened parameter. Left alone, Megatron-Core 0.16.1 gathers whole tensors first: all of
the state in the memory of one rank or of each. Here nothing is gathered. A range is cut into boxes, so that tensors
have the same names and shapes in a checkpoint as Megatron's own, and any layout loads either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins in a tensor, and how long it is, in each dimension."""


def share_optimizer_state() -> None:
    """From now on, the fully reshardable format of this process has each rank's own share."""
    DistributedOptimizer.sharded_param_state_fully_reshardable = _own_share
    DistributedOptimizer.load_parameter_state_from_fully_reshardable = _take_share


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements from `start` up to `stop` of a tensor of this shape, counted row by row, as boxes in that order."""
    if start >= stop:
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # of the whole rows, and after them
    if first > last:  # all within one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for begin, size in boxes_of_range(shape[1:], start, stop):
        yield (row, *begin), (1, *size)


def _own_share(
    self: Any,
    model_sharded_state_dict: Any,
    is_loading: bool = False,
    metadata: Any = None,  # noqa: ARG001
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """In place of Megatron's method of these arguments: parameter's number → kind of state → boxes of this rank's range
    of it, in its order. Loaded boxes get memory of their own on the host."""
    places = {entry.data: entry for entry in nested_values(model_sharded_state_dict) if _is_of_parameter(entry)}
    share = {}
    for number, (parameter, start, stop) in enumerate(_held_ranges(self)):
        parts = _parts(places[parameter])
        share[number] = {
            kind: [
                box
                for part, offset in parts
                for box in _sharded_boxes(kind, part, offset, flat, start, stop, with_data=not is_loading)
            ]
            for kind, flat in _state_tensors(self, parameter).items()
        }
    return share


@torch.no_grad()
def _take_share(self: Any, loaded: dict[int, dict[str, list[Tensor]]]) -> None:
    """In place of Megatron's method: copy what was loaded for `_own_share` into the optimizer."""
    for number, (parameter, _, _) in enumerate(_held_ranges(self)):
        for kind, flat in _state_tensors(self, parameter).items():
            flat.copy_(torch.cat([box.flatten() for box in loaded[number][kind]]))


def _held_ranges(optimizer: Any) -> Iterator[tuple[Tensor, int, int]]:
    """Each parameter of which this rank keeps state, and the range of its flattened elements."""
    for buckets in optimizer.gbuf_ranges:
        for bucket in (one for of_dtype in buckets.values() for one in of_dtype):
            for parameter, ranges in bucket["param_map"].items():
                yield parameter, ranges["param"].start, ranges["param"].end


def _state_tensors(optimizer: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Main copy and moments [elements of the range]. Steps are with the groups (see training_state)."""
    found: dict[str, Tensor] = optimizer._get_main_param_and_optimizer_states(parameter)
    return {kind: tensor.detach() for kind, tensor in found.items() if kind != "step"}


def _is_of_parameter(entry: Any) -> bool:
    return isinstance(entry, ShardedTensor | ShardedTensorFactory)


def _parts(entry: ShardedTensor | ShardedTensorFactory) -> list[tuple[ShardedTensor, int]]:
    """The parts of a parameter that a checkpoint has in different places, such as gate and up of an MLP; each with
    the number of the parameter's elements before it. Raises ValueError for a part that is not a run of elements."""
    if isinstance(entry, ShardedTensor):
        return [(entry, 0)]
    whole, parts = entry.data, list(nested_values(entry.build()))
    for part in parts:
        shared = part.data.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        if not (shared and part.data.is_contiguous()):
            raise ValueError(f"{part.key} is stored in another order than the optimizer's; its state cannot be shared")
    placed = [(part, part.data.storage_offset() - whole.storage_offset()) for part in parts]
    return sorted(placed, key=lambda one: one[1])


def _sharded_boxes(
    kind: str, part: ShardedTensor, offset: int, flat: Tensor, start: int, stop: int, *, with_data: bool
) -> Iterator[ShardedTensor]:
    """What the range from `start` to `stop` of a parameter, with the state `flat` [stop - start], has of `part`, whose
    elements begin at `offset` of the parameter."""
    at = max(start, offset)
    shape = tuple(part.local_shape)
    more = (0,) * part.prepend_axis_num
    for begin, size in boxes_of_range(shape, at - offset, min(stop - offset, math.prod(shape))):
        number = math.prod(size)
        size = (*(1 for _ in more), *size)
        yield ShardedTensor(
            key=f"optimizer.state.{kind}.{part.key}",
            data=flat[at - start : at - start + number].view(size) if with_data else None,
            dtype=flat.dtype,
            local_shape=size,
            global_shape=part.global_shape,
            global_offset=tuple(map(sum, zip(part.global_offset, (*more, *begin), strict=True))),
            axis_fragmentations=None,  # no regular grid
            replica_id=(*part.replica_id[:2], 0),  # no two data parallel ranks have the same elements
            allow_shape_mismatch=part.allow_shape_mismatch,
        )
        at += number
