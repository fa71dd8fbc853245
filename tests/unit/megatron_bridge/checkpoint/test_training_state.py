"""What a learner takes from a checkpoint of another recipe, and what it leaves there."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.verify.layout_ranks import TEMPERATURE, train, weights
from launch.verify.layouts import write_model
from megatron_bridge.learner import MegatronLearner
from pipeline.config.recipe import LearnerSection, OptimizerSection
from pipeline.errors import CorruptCheckpointError
from precision.objectives.p3o import P3O
from tests.support.learners import learner_here

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")
]


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
