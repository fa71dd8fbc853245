"""Weights alone as a Megatron distributed checkpoint: what one layout wrote, any layout loads. No optimizer, no RNG.

What Transformer Engine (TE) and Megatron's own layers write, either loads, FP8 or not. TE's `_extra_state` is left out:
it is a pickle, holds nothing under the recipes whose scales come from the tensor itself, and scales of the delayed one
are found anew (`te_precision.warm_up_passes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_bridge.checkpoint.damage import damage_as
from megatron_bridge.checkpoint.dcp_reader import CheckpointIndex, StoredTensor
from megatron_bridge.checkpoint.shard_writers import write_in_threads
from pipeline.errors import CorruptCheckpointError


def save(directory: Path, chunks: Sequence[Any]) -> None:
    """Write the weights of the model chunks (not wrapped in DDP) into an empty directory. Collective."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    write_in_threads()
    dist_checkpointing.save(sharded_weights(chunks), str(directory))


def load(directory: Path, chunks: Sequence[Any]) -> None:
    """Fill the model chunks from a weights-only checkpoint, or from the weights of a run's. Collective.

    Stored values are cast to the chunks' dtype. Raises CorruptCheckpointError.
    """
    index = CheckpointIndex(directory)  # Megatron unpickles the index without looking: look first
    with damage_as(
        lambda why: (
            f"{directory} does not hold this model's weights ({why}); look at it with `evenkeel convert inspect`"
        )
    ):
        loaded = dist_checkpointing.load(sharded_weights(chunks, index.tensors), str(directory))
    with torch.no_grad():
        for key, chunk in zip(chunk_keys(chunks), chunks, strict=True):
            fill(chunk, loaded[key])


def sharded_weights(
    chunks: Sequence[Any], stored: Mapping[str, StoredTensor] | None = None
) -> dict[str, dict[str, Any]]:
    """Chunk key → parameter name → where it lies in a checkpoint: in the one that holds `stored`, or in a new one."""
    found = {}
    for key, chunk in zip(chunk_keys(chunks), chunks, strict=True):
        state = {name: entry for name, entry in chunk.sharded_state_dict().items() if not _is_extra(name)}
        for entry in state.values():
            if stored is not None and isinstance(entry, ShardedTensor):
                entry.key = _stored_key(entry.key, stored)
        found[key] = state
    return found


def fill(chunk: Any, state: Mapping[str, Any]) -> None:
    """Copy loaded values into a chunk that is not wrapped in DDP. Raises CorruptCheckpointError if some are missing."""
    missing, unexpected = chunk.load_state_dict(state, strict=False)
    wrong = [name for name in (*missing, *unexpected) if not _is_extra(name)]
    if wrong:
        raise CorruptCheckpointError(
            f"{len(wrong)} names of the checkpoint's weights are not those of this model, the first {wrong[0]}; "
            "give the checkpoint of this model"
        )


def _is_extra(name: str) -> bool:
    return "._extra_state" in name  # TE's grouped linears add a number


_MIXTURE_NORMS = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
"""The norm before a mixture, as Megatron's own layers and TE's name it in checkpoints. All else has one name."""


def _stored_key(key: str, stored: Mapping[str, StoredTensor]) -> str:
    for own, other in (_MIXTURE_NORMS, _MIXTURE_NORMS[::-1]):
        renamed = key.removesuffix(own) + other
        if key.endswith(own) and key not in stored and renamed in stored:
            return renamed
    return key


def chunk_keys(chunks: Sequence[Any]) -> list[str]:
    """Megatron's names of a rank's chunks.

    They count in this process only: a checkpoint names tensors by their layer in the whole model, so that virtual
    stages reshard like any others.
    """
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
