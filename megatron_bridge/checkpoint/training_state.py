"""Learner state on disk, in Megatron's distributed format: what one layout saved, any layout loads.

So does any precision but float32 for bfloat16 and FP8, and either kind of layers: see `weights_only`.

Files of the format are pickles, of which nothing but numbers and tensors is let through. The index is searched for
foreign classes before Megatron loads it. `common.pt`, tensors and the state of random generators are read with
`weights_only=True`; the last not by Megatron, which would read any object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_bridge.checkpoint.beside_training import ShardSave, storages_of
from megatron_bridge.checkpoint.damage import damage_as
from megatron_bridge.checkpoint.dcp_reader import CheckpointIndex, StoredTensor
from megatron_bridge.checkpoint.optimizer_shares import share_optimizer_state
from megatron_bridge.checkpoint.shard_writers import write_in_threads
from megatron_bridge.checkpoint.weights_only import chunk_keys, fill, sharded_weights
from megatron_bridge.parallel.layout import Layout
from pipeline.data.files import machine_failure
from pipeline.errors import CorruptCheckpointError
from precision.text import one_line

_RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}


def begin_save(
    directory: Path,
    model: Sequence[Any],
    optimizer: Any,
    *,
    step: int,
    layout: Layout,
    all_of: Callable[[Callable[[], bool]], bool],
) -> ShardSave:
    """Write weights, optimizer state, step and RNG state, as they are now, into an empty directory. Collective.
    `all_of` as in ShardSave."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    _begin_states(optimizer)
    state = _sharded_state(model, optimizer)
    state["learner"] = {"step": step, "layout": asdict(layout), "device": _device()}
    state["rng"] = _rng_object(_rng_state())
    write_in_threads()
    in_training = storages_of(state)
    return ShardSave(
        dist_checkpointing.save(state, str(directory), async_sharded_save=True), all_of, in_training=in_training
    )


def load(directory: Path, model: Sequence[Any], optimizer: Any, *, layout: Layout) -> int:
    """Restore model, optimizer and, when layout and kind of device are those that saved, RNG. Returns the step.
    Collective.

    Raises CorruptCheckpointError when the directory does not hold such a checkpoint. What another rank or the machine
    raises is not taken for damage.
    """
    index = CheckpointIndex(directory)  # Megatron unpickles the index without looking: look first
    for part in _distributed_parts(optimizer):
        # Loading fills the optimizer's tensors, and Adam makes its own only in the first step.
        part._init_optimizer_states_with_dummy_values()
    state = _sharded_state(model, optimizer, index.tensors)
    step, same_ranks = _said_by_the_learner(directory, layout)
    rng = _stored_rng(index) if same_ranks else None
    with damage_as(lambda why: f"{directory} is not a complete checkpoint ({why}); use an older one"):
        loaded = dist_checkpointing.load(state, str(directory))
    for name, chunk in _named_chunks(model):
        fill(chunk, loaded[name])
    _place_steps(optimizer, loaded["optimizer"])
    optimizer.load_state_dict(loaded["optimizer"])
    _unshare_steps(optimizer)
    if rng is not None:
        _restore_rng(rng)
    return step


def _said_by_the_learner(directory: Path, layout: Layout) -> tuple[int, bool]:
    """The step, and whether layout and kind of device are those that saved. Raises CorruptCheckpointError."""
    try:
        saved = dist_checkpointing.load_common_state_dict(str(directory))["learner"]
        return int(saved["step"]), saved["layout"] == asdict(layout) and saved.get("device", _device()) == _device()
    except MemoryError:
        raise
    except Exception as error:  # what a damaged pickle raises depends on its bytes
        if machine_failure(error) is not None:
            raise
        raise CorruptCheckpointError(
            f"{directory} is not a complete checkpoint (common.pt: {type(error).__name__}: {one_line(error, 300)}); "
            "use an older one"
        ) from error


def _distributed_parts(optimizer: Any) -> list[Any]:
    return [part for part in optimizer.chained_optimizers if hasattr(part, "_init_optimizer_states_with_dummy_values")]


def _begin_states(optimizer: Any) -> None:
    """Give an optimizer that has taken no step the state that its first one begins with. Megatron-Core 0.16.1 saves
    only what is there, and refuses torch's Adam without any."""
    for part in optimizer.chained_optimizers:
        if part.optimizer.state:
            continue
        part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, torch.optim.AdamW):
            for state in part.optimizer.state.values():
                state["step"] = torch.tensor(0.0)
        else:
            for group in part.optimizer.param_groups:
                group["step"] = 0


def _unshare_steps(optimizer: Any) -> None:
    """Give each parameter a `step` tensor of its own, and each group a whole number.

    Megatron-Core 0.16.1 loads one tensor for all parameters, which torch.optim.AdamW would then advance once for each
    of them. It gives groups the float that torch saved, where TE's kernel needs an int.
    """
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = int(group["step"])
        for state in part.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _place_steps(optimizer: Any, loaded: dict[Any, Any]) -> None:
    """Put the loaded step where the optimizer looks for it.

    torch's Adam keeps a step for each parameter, TE's one for each group. Without the distributed optimizer,
    Megatron-Core 0.16.1 loads it where the optimizer that saved it kept it.
    """
    parts = optimizer.chained_optimizers
    for number, part in enumerate(parts):
        if part in _distributed_parts(optimizer):
            continue
        state = loaded if len(parts) == 1 else loaded[number]
        state = state.get("optimizer", state)  # float32 parameters: nothing beside Adam's own
        steps = [group.pop("step") for group in state["param_groups"] if "step" in group]
        step = state["state"].pop("common_step", next(iter(steps), 0))  # Megatron leaves out a 0
        if isinstance(part.optimizer, torch.optim.AdamW):
            state["state"]["common_step"] = torch.tensor(float(step))
        else:
            for group in state["param_groups"]:
                group["step"] = int(step)


def _sharded_state(
    model: Sequence[Any], optimizer: Any, stored: Mapping[str, StoredTensor] | None = None
) -> dict[str, Any]:
    """What is saved; or, with `stored`, what is filled from the checkpoint that holds it.

    The optimizer names its tensors after those of the model.
    """
    weights = sharded_weights([chunk.module for chunk in model], stored)
    share_optimizer_state()
    metadata = {"metadata": _RESHARDABLE} if _distributed_parts(optimizer) else {}
    named = dict(weights) if len(model) > 1 else weights["model"]
    return {
        **weights,
        "optimizer": optimizer.sharded_state_dict(named, is_loading=stored is not None, **metadata),
    }


def _named_chunks(model: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(key, chunk.module) for key, chunk in zip(chunk_keys(model), model, strict=True)]


def _device() -> str:
    """The kind of device that this process computes on. States of random generators fit one kind only."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _rng_object(data: dict[str, Any] | None) -> ShardedObject:
    """One object for each rank: generators differ over tensor, pipeline and data parallel ranks."""
    return ShardedObject("rng", data, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _stored_rng(index: CheckpointIndex) -> dict[str, Any]:
    """What `_rng_state` returned on this rank when it was saved. Raises CorruptCheckpointError."""
    match index.read_object(_rng_object(None).unique_key):
        case [{"torch": torch.Tensor(), "tracker": dict()} as state]:  # Megatron makes a list of every object
            return dict(state)
    raise CorruptCheckpointError(f"{index.directory} holds no state of random generators where it should; use another")


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
