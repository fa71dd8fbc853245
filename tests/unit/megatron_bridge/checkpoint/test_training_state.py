"""What a learner takes from a checkpoint of another recipe, and what it leaves there."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from launch.verify.layout_ranks import TEMPERATURE, train, weights
from launch.verify.layouts import write_model
from megatron_bridge.checkpoint import dcp
from megatron_bridge.checkpoint.dcp import CheckpointIndex
from megatron_bridge.checkpoint.training_state import ShardSave, damage_as, storages_of
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.step.host_weights import PinnedMemory
from pipeline.config.recipe import LearnerSection, OptimizerSection
from pipeline.errors import CorruptCheckpointError
from precision.objectives.p3o import P3O
from tests.support.learners import learner_here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "dense"
    write_model(folder, experts=False)
    return folder


def learner(model: Path, distributed: bool = True, **optimizer: Any) -> AbstractContextManager[MegatronLearner]:
    section = LearnerSection(
        precision="fp32",
        micro_batch_tokens=256,
        distributed_optimizer=distributed,
        optimizer=OptimizerSection(lr=1e-3, warmup_steps=0, **optimizer),
    )
    return learner_here(model, section, P3O(), temperature=TEMPERATURE, seed=0, total_steps=4)


@pytest.mark.parametrize("distributed", [True, False])
def test_the_optimizer_goes_by_the_recipe_and_not_by_the_checkpoint(
    model: Path, tmp_path: Path, distributed: bool
) -> None:
    """A fork may change betas and eps; Megatron loads those that were saved."""
    with learner(model, distributed, betas=(0.5, 0.6), eps=1e-3) as before:
        train(before, 0)
        before.save(tmp_path / "saved")
    with learner(model, distributed, betas=(0.8, 0.9), eps=1e-6) as fork:
        fork.load(tmp_path / "saved")
        train(fork, 1)
        used = {(tuple(group["betas"]), group["eps"]) for group in fork.optimizer.param_groups}
    assert used == {((0.8, 0.9), 1e-6)}


@pytest.mark.parametrize("distributed", [True, False])
def test_a_learner_that_has_taken_no_step_is_saved_too(model: Path, tmp_path: Path, distributed: bool) -> None:
    """When the first batch was lost by damage, for example."""
    with learner(model, distributed) as fresh:
        initial = weights(fresh)
        fresh.save(tmp_path / "saved")
        assert (weights(fresh) == initial).all()
        train(fresh, 0)
        train(fresh, 1)
        expected = weights(fresh)
    with learner(model, distributed) as straight:
        train(straight, 0)
        train(straight, 1)
        assert (weights(straight) == expected).all()
    with learner(model, distributed) as again:
        train(again, 2)
        again.load(tmp_path / "saved")
        assert again.step == 0
        assert (weights(again) == initial).all()
        train(again, 0)
        train(again, 1)
        assert (weights(again) == expected).all()


@pytest.fixture(scope="module")
def loaded(model: Path) -> Iterator[MegatronLearner]:
    with learner(model) as created:
        yield created


@pytest.fixture(scope="module")
def whole(loaded: MegatronLearner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "whole"
    train(loaded, 0)
    loaded.save(folder)
    return folder


class _Touch:
    """What it touches shows that it was unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def saved_bytes(value: Any) -> bytes:
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


def say_of_random_numbers(folder: Path, content: bytes) -> None:
    """Other bytes for the state of the generators of rank 0."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - our own
    (folder / "other.distcp").write_bytes(content)
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == "rng/shard_0_1")
    place.relative_path, place.offset, place.length = "other.distcp", 0, len(content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def say_in_common(folder: Path, content: bytes) -> None:
    (folder / "common.pt").write_bytes(content)


def spoil_tensors(folder: Path, content: bytes) -> None:
    """Files as long as before, so that the index does not show it."""
    for file in folder.glob("*.distcp"):
        file.write_bytes(content.ljust(file.stat().st_size, b"\0")[: file.stat().st_size])


@pytest.mark.parametrize("content", ["a foreign class", "nothing", "no pickle", "another pickle"])
@pytest.mark.parametrize("place", [say_of_random_numbers, say_in_common, spoil_tensors])
def test_what_is_no_checkpoint_is_refused_and_not_unpickled(
    loaded: MegatronLearner, whole: Path, tmp_path: Path, place: Callable[[Path, bytes], None], content: str
) -> None:
    contents = {
        "a foreign class": saved_bytes([_Touch(tmp_path / "touched")]),
        "nothing": b"",
        "no pickle": b"\x80\x04no pickle",
        "another pickle": saved_bytes([1]),
    }
    place(shutil.copytree(whole, tmp_path / "damaged"), contents[content])
    with pytest.raises(CorruptCheckpointError):
        loaded.load(tmp_path / "damaged")
    assert not (tmp_path / "touched").exists()
    loaded.load(whole)


@pytest.fixture(params=[False, True], ids=["host", "pinned"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PinnedMemory:
    """A host's, and a GPU's without a GPU."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **kinds: empty(*sizes, **kinds))
    return PinnedMemory(request.param, block_bytes=4096)


class Event:
    """In the place of torch.cuda.Event: nothing is copied until it is waited for."""

    waited: ClassVar[list[bool]] = []

    def record(self) -> None:
        self.waited.append(False)

    def synchronize(self) -> None:
        self.waited[-1] = True


def test_only_what_training_changes_is_copied_and_nothing_is_kept_twice(
    tmp_path: Path, memory: PinnedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-Core's writer keeps its buckets until all ranks have written. A second save takes the same memory."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for number in range(2):
        save_once(tmp_path, memory)
        assert memory.num_bytes == (4096 if memory.pinned else 0)
        assert Event.waited == [True] * (number + 1) * memory.pinned
    Event.waited.clear()


def save_once(tmp_path: Path, memory: PinnedMemory) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"written")
    live, private = torch.zeros(4), torch.ones(3)
    state = {"a": [ShardedTensor.from_rank_offsets("a", live)], "b": 7}
    buckets = [(str(file), "key", ([], [("live", live[:2].view(2, 1)), ("private", private)]))]
    written: list[Any] = []
    request = SimpleNamespace(
        preload_fn=lambda: [(path, key, (texts, list(tensors))) for path, key, (texts, tensors) in buckets],
        async_fn=lambda rank, given, results: written.extend(given) if all(Event.waited) else None,
        async_fn_args=[0, buckets, None],
        async_fn_kwargs={},
        finalize_fns=[],
    )
    save = ShardSave(request, lambda says: [says()], in_training=storages_of(state), memory=memory)
    live += 1
    while not save.advance(3.0):
        pass
    ((path, key, (texts, tensors)),) = written
    assert (path, key, texts) == (str(file), "key", [])
    assert save.hashed == {"key": (7, hashlib.sha256(b"written").hexdigest())}
    (_, first), (_, second) = tensors
    assert torch.equal(first, torch.zeros(2, 1))
    assert first.untyped_storage().nbytes() == first.nbytes, "else torch.save would write the whole block"
    assert second is private
    assert buckets == [(str(file), "key", ([], []))]


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

    (tmp_path / dcp.INDEX_FILE).write_bytes(pickle.dumps({}))
    monkeypatch.setattr(dcp, "_IndexUnpickler", Stale)
    with pytest.raises(OSError, match="Stale file handle"):
        CheckpointIndex(tmp_path)
