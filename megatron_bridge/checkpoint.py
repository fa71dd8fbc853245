"""Learner state on disk, in Megatron's distributed format: what one layout saved, any layout loads.

The format's index is a pickle, which is searched for foreign classes before Megatron loads it; so is `common.pt`, which
is not: load only what you saved.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_bridge.checkpoint_index import CheckpointIndex
from megatron_bridge.layout import Layout
from megatron_bridge.weight_checkpoint import chunk_keys
from pipeline.errors import CorruptCheckpointError

_RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


def save(directory: Path, model: Sequence[Any], optimizer: Any, *, step: int, layout: Layout) -> None:
    """Write weights, optimizer state, step and RNG state into an empty directory. Collective."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _sharded_state(model, optimizer, is_loading=False)
    state["learner"] = {"step": step, "layout": asdict(layout)}
    state["rng"] = _rng_object(_rng_state())
    # A save that blocks hands its results over inside this process. Left alone, Megatron starts a manager process for
    # them, which imports the whole program again (seconds) and outlives a rank that is killed.
    filesystem_async._results_queue = queue.SimpleQueue()
    dist_checkpointing.save(state, str(directory))


def load(directory: Path, model: Sequence[Any], optimizer: Any, *, layout: Layout) -> int:
    """Restore model, optimizer and, when the layout is the one that saved, RNG. Returns the step. Collective.

    Raises CorruptCheckpointError when the directory does not hold such a checkpoint.
    """
    CheckpointIndex(directory)  # Megatron unpickles the index without looking: look first
    for part in _distributed_parts(optimizer):
        # Loading fills tensors in place, and Adam makes its own only in the first step.
        part._init_optimizer_states_with_dummy_values()
    state = _sharded_state(model, optimizer, is_loading=True)
    try:
        saved = dist_checkpointing.load_common_state_dict(str(directory))["learner"]
        same_layout = saved["layout"] == asdict(layout)
        if same_layout:
            state["rng"] = _rng_object(None)
        loaded = dist_checkpointing.load(state, str(directory))
    except (CheckpointingException, OSError, KeyError, RuntimeError) as error:
        raise CorruptCheckpointError(
            f"{directory} is not a complete checkpoint ({' '.join(str(error).split())[:300]}); use an older one"
        ) from error
    for name, chunk in _named_chunks(model):
        chunk.load_state_dict(loaded[name], strict=True)
    optimizer.load_state_dict(loaded["optimizer"])
    _unshare_steps(optimizer)
    if same_layout:
        _restore_rng(loaded["rng"])
    return int(saved["step"])


def _distributed_parts(optimizer: Any) -> list[Any]:
    return [part for part in optimizer.chained_optimizers if hasattr(part, "_init_optimizer_states_with_dummy_values")]


def _unshare_steps(optimizer: Any) -> None:
    """Megatron-Core 0.16.1 gives all parameters one and the same `step` tensor when it loads, which torch.optim.AdamW
    then advances once for each parameter."""
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _sharded_state(model: Sequence[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {name: chunk.sharded_state_dict() for name, chunk in _named_chunks(model)}
    metadata = {"metadata": _RESHARDABLE} if _distributed_parts(optimizer) else {}
    weights = dict(state) if len(model) > 1 else state["model"]
    state["optimizer"] = optimizer.sharded_state_dict(weights, is_loading=is_loading, **metadata)
    return state


def _named_chunks(model: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(key, chunk.module) for key, chunk in zip(chunk_keys(model), model, strict=True)]


def _rng_object(data: dict[str, Any] | None) -> ShardedObject:
    """One object for each rank: generators differ over tensor, pipeline and data parallel ranks."""
    return ShardedObject("rng", data, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _rng_state() -> dict[str, Any]:
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    state = {"torch": torch.get_rng_state(), "tracker": {name: value.clone() for name, value in tracker.items()}}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
