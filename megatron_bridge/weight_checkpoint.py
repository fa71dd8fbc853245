"""Weights alone as a Megatron distributed checkpoint: what one layout wrote, any layout loads. No optimizer, no RNG."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_bridge.checkpoint_index import CheckpointIndex
from pipeline.errors import CorruptCheckpointError


def save(directory: Path, chunks: Sequence[Any]) -> None:
    """Write the weights of the model chunks (not wrapped in DDP) into an empty directory. Collective."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    # As in `checkpoint.save`: results stay in this process, so that Megatron starts no manager process for them.
    filesystem_async._results_queue = queue.SimpleQueue()
    dist_checkpointing.save(_sharded_state(chunks), str(directory))


def load(directory: Path, chunks: Sequence[Any]) -> None:
    """Fill the model chunks from a weights-only checkpoint, or from the weights of a run's. Collective.

    Stored values are cast to the chunks' dtype. Raises CorruptCheckpointError.
    """
    CheckpointIndex(directory)  # Megatron unpickles the index without looking: look first
    try:
        loaded = dist_checkpointing.load(_sharded_state(chunks), str(directory))
    except (CheckpointingException, OSError, KeyError, RuntimeError) as error:
        raise CorruptCheckpointError(
            f"{directory} does not hold this model's weights ({' '.join(str(error).split())[:300]}); "
            "look at it with `evenkeel convert inspect`"
        ) from error
    with torch.no_grad():
        for key, chunk in zip(chunk_keys(chunks), chunks, strict=True):
            chunk.load_state_dict(loaded[key], strict=True)


def _sharded_state(chunks: Sequence[Any]) -> dict[str, Any]:
    return {key: chunk.sharded_state_dict() for key, chunk in zip(chunk_keys(chunks), chunks, strict=True)}


def chunk_keys(chunks: Sequence[Any]) -> list[str]:
    """Megatron's names of a rank's chunks, for this process only: the tensors inside are named by their layer in the
    whole model, so that virtual stages reshard like any others."""
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
