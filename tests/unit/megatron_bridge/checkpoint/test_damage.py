"""What ends a run for good while a checkpoint is loaded, and what does not."""

from __future__ import annotations

import errno
import os
import pickle
import traceback
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_bridge.checkpoint import dcp_reader
from megatron_bridge.checkpoint.damage import damage_as
from megatron_bridge.checkpoint.dcp_reader import CheckpointIndex
from pipeline.errors import CorruptCheckpointError

DAMAGE = [
    CheckpointingException("Object shard rng not found"),
    KeyError("decoder.layers.w"),
    EOFError("Ran out of input"),
    pickle.UnpicklingError("invalid load key"),
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
    RuntimeError("PytorchStreamReader failed reading zip archive: failed finding central directory"),
]
BLAMELESS = [
    OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
    OSError(errno.EIO, os.strerror(errno.EIO)),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
]
KILLED = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection reset by peer [10.0.0.7]:51312")


def met_by_a_rank(error: Exception) -> CheckpointException:
    """As torch reports it on every rank."""
    return CheckpointException("read", {1: (error, traceback.StackSummary())})


@pytest.mark.parametrize("error", [*DAMAGE, *map(met_by_a_rank, DAMAGE)], ids=repr)
def test_damage_names_the_folder(error: BaseException) -> None:
    with (
        pytest.raises(CorruptCheckpointError, match="000012 is damaged"),
        damage_as(lambda why: f"000012 is damaged ({why})"),
    ):
        raise error


@pytest.mark.parametrize("error", [*BLAMELESS, KILLED], ids=repr)
def test_a_rank_that_was_killed_or_a_machine_that_fails_is_no_damage(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, damage_as(str):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("error", BLAMELESS, ids=repr)
def test_what_the_machine_of_one_rank_met_is_no_damage(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, damage_as(str):
        raise met_by_a_rank(error)
    assert raised.value is error


def test_an_index_that_a_mount_cannot_read_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale(pickle.Unpickler):  # noqa: S301
        def load(self) -> None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    (tmp_path / dcp_reader.INDEX_FILE).write_bytes(pickle.dumps({}))
    monkeypatch.setattr(dcp_reader, "_IndexUnpickler", Stale)
    with pytest.raises(OSError, match="Stale file handle"):
        CheckpointIndex(tmp_path)
