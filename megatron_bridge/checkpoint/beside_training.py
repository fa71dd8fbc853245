"""A save that goes on while the learner trains: implements pipeline.ports.learner.SaveUnderWay.

    main thread   plan ─▶ copy to host memory ─▶ train ─▶ train ─▶ "are all written?" ─▶ index of the shards
    writer thread                             └─▶ write and fsync this rank's shards ─┘

Megatron-Core prepares such a save as a request: a function that writes, and functions that complete the folder once all
ranks have written. Its own caller of such requests forks; ours is a thread (see shard_writers). The copy takes as much
host memory as the rank's share of the checkpoint, until it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from pipeline import spans
from pipeline.background import in_background


class ShardSave:
    """Of one rank."""

    def __init__(
        self, request: Any, all_of: Callable[[Callable[[], bool]], bool], *, in_training: frozenset[int]
    ) -> None:
        """`request` is Megatron-Core's AsyncRequest; `all_of` is collective: whether all ranks say so. `in_training`
        are the `storages_of` what training goes on with."""
        self._all_of = all_of
        self._complete = list(request.finalize_fns)
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = _copied(request.async_fn_args[1], in_training)
            _forget(request.async_fn_args[1])

        def write() -> None:
            with spans.span("save", "write"):
                request.async_fn(*arguments, **request.async_fn_kwargs)
            arguments.clear()  # the copy's memory

        self._written: Future[None] | None = None if request.async_fn is None else in_background(write, "shards")

    def advance(self, wait_s: float) -> bool:
        """See SaveUnderWay."""
        if not self._all_of(lambda: self._is_written(wait_s)):
            return False
        for complete in self._complete:
            complete()
        return True

    def _is_written(self, wait_s: float) -> bool:
        if self._written is None:  # this rank holds nothing that another one does not write
            return True
        wait([self._written], wait_s)
        if self._written.done():
            self._written.result()
            return True
        return False


def storages_of(state: Any) -> frozenset[int]:
    """Where the tensors of a sharded state have their numbers."""
    data = (entry.data for entry in nested_values(state) if isinstance(entry, ShardedTensor | ShardedTensorFactory))
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in data)


def _copied(buckets: list[Any], in_training: frozenset[int]) -> list[Any]:
    """Buckets in host memory, whose tensors no optimizer step changes.

    Megatron's own `preload_fn` copies into pinned memory, which torch rounds up to powers of two and never gives back:
    that may be as much again as the checkpoint. This copy takes longer, and what it needs, and that for a while.
    """
    return [
        (path, key, (texts, [(item, _own(tensor, in_training)) for item, tensor in tensors]))
        for path, key, (texts, tensors) in buckets
    ]


def _own(tensor: torch.Tensor, in_training: frozenset[int]) -> torch.Tensor:
    """A part of a larger tensor on the host is a copy already."""
    if tensor.device.type != "cpu":
        return tensor.to("cpu")
    return tensor.clone() if tensor.untyped_storage().data_ptr() in in_training else tensor


def _forget(buckets: list[Any]) -> None:
    """Let go of the tensors of buckets that Megatron's writer keeps until all ranks have written."""
    for _, _, (_, tensors) in buckets:
        tensors.clear()
