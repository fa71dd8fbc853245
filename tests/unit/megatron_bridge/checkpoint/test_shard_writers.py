"""A save forks nothing: a killed rank leaves no writer behind, and none can leave it waiting."""

from __future__ import annotations

import errno
import functools
import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async

from launch.verify.layout_ranks import TEMPERATURE, train, weights
from launch.verify.layouts import write_model
from megatron_bridge.checkpoint import training_state
from megatron_bridge.learner import MegatronLearner
from pipeline.config.recipe import LearnerSection, OptimizerSection
from pipeline.data.checksums import fingerprints
from precision.objectives.p3o import P3O
from tests.support.learners import learner_here


def learner(folder: Path, distributed: bool = True) -> AbstractContextManager[MegatronLearner]:
    if not folder.exists():
        write_model(folder, experts=False)
    section = LearnerSection(
        precision="fp32",
        micro_batch_tokens=256,
        distributed_optimizer=distributed,
        optimizer=OptimizerSection(lr=1e-3, warmup_steps=0),
    )
    return learner_here(folder, section, P3O(), temperature=TEMPERATURE, seed=0, total_steps=4)


def test_a_save_forks_nothing_and_loads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise AssertionError("a process was forked")

    with learner(tmp_path / "model") as trained:
        train(trained, 0)
        monkeypatch.setattr(os, "fork", fork)
        trained.save(tmp_path / "saved")
        training_state.save_weights(tmp_path / "weights", [chunk.module for chunk in trained.model])
        monkeypatch.undo()
        alone = weights(trained)
        assert len(list((tmp_path / "saved").glob("*.distcp"))) >= 2, "several files, as Megatron's processes write"
        train(trained, 1)
        expected = weights(trained)
    with learner(tmp_path / "model") as again:
        training_state.load_weights(tmp_path / "weights", [chunk.module for chunk in again.model])
        assert (weights(again) == alone).all()
        again.load(tmp_path / "saved")
        train(again, 1)
        assert (weights(again) == expected).all()


def test_what_one_writer_meets_is_what_the_save_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write_item = filesystem_async._write_item

    @functools.wraps(write_item)  # Megatron looks at its parameters
    def full(transforms: Any, stream: Any, *arguments: Any, **options: Any) -> Any:
        written.append(stream.name)
        if stream.name.endswith("1.distcp"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_item(transforms, stream, *arguments, **options)

    with learner(tmp_path / "model") as trained:
        train(trained, 0)
        monkeypatch.setattr(filesystem_async, "_write_item", full)
        with pytest.raises(OSError, match="No space left on device"):
            trained.save(tmp_path / "saved")
        assert len(set(written)) >= 2


@pytest.mark.parametrize("distributed", [True, False])
def test_what_is_trained_meanwhile_is_not_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distributed: bool
) -> None:
    """The writers are held until two more steps are trained."""
    trained_on = threading.Event()
    write_item = filesystem_async._write_item

    @functools.wraps(write_item)
    def held(*arguments: Any, **options: Any) -> Any:
        assert trained_on.wait(60.0)
        return write_item(*arguments, **options)

    with learner(tmp_path / "model", distributed) as trained:
        train(trained, 0)
        saved = weights(trained)
        monkeypatch.setattr(filesystem_async, "_write_item", held)
        under_way = trained.begin_save(tmp_path / "saved")
        assert not under_way.advance(0.0)
        train(trained, 1)
        expected = weights(trained)
        train(trained, 2)
        trained_on.set()
        while not under_way.advance(3.0):
            pass
        shards = sorted((tmp_path / "saved").glob("*.distcp"))
        assert under_way.hashed == {file.name: one for file, one in zip(shards, fingerprints(shards), strict=True)}
        assert not (weights(trained) == saved).all()
    with learner(tmp_path / "model", distributed) as again:
        again.load(tmp_path / "saved")
        assert again.step == 1
        assert (weights(again) == saved).all()
        train(again, 1)
        assert (weights(again) == expected).all(), "the optimizer's state is that of the save, too"
