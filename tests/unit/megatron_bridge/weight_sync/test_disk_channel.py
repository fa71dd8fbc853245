"""What a publish by disk does when it fails before the engines are asked: a real learner, and engines that take all."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bridge.weight_sync.disk import DiskChannel, ProbeScorer, WeightCheckPlan, prune
from pipeline.data.files import remove_leftovers
from pipeline.data.run_directory import RunDirectory, numbered_folders, unfenced
from pipeline.errors import NonFiniteError
from pipeline.ports.weights import WeightCheck
from precision.formats.quant_map import QuantMap, QuantMapFile
from tests.support.delta_policies import drawn, moved, write_version


class Taking:
    """Engines that take what they are told to."""

    async def load(self, version: int, directory: Path, check: WeightCheck) -> dict[str, float]:
        await asyncio.sleep(0)
        assert WeightCheck.load(directory, version) == check
        return {"load_s": 0.0}


class Recorder:
    """Checksums of nothing; or an error, as when a part of a stacked parameter never came."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def watch(self, stream: Any) -> Any:
        return stream

    def digests(self) -> tuple[dict[str, str], ...]:
        if self._error is not None:
            raise self._error
        return ({"a": "b"},)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.make_folders()
    return run


def channel(learner: Any, run: RunDirectory, recorder: Recorder, quant: QuantMap | None = None) -> DiskChannel:
    plan = WeightCheckPlan(rows=((1, 2, 3, 4),), max_mean_gap_nats=1.0, new_checksums=lambda: recorder)  # type: ignore[arg-type, return-value]
    engines: Any = Taking()
    return DiskChannel(learner, engines, run, quant, plan, ProbeScorer(learner), keep=1, deadline_s=10.0)


def test_the_check_is_part_of_the_folder_that_gets_a_name(learner: Any, run: RunDirectory) -> None:
    channel(learner, run, Recorder()).publish(1)
    sums = (run.policy_directory(1) / "SHA256SUMS").read_text()
    assert "weight_check.json" in sums


def test_a_folder_without_its_check_gets_no_name(learner: Any, run: RunDirectory) -> None:
    with pytest.raises(ValueError, match="a part never came"):
        channel(learner, run, Recorder(ValueError("a part never came"))).publish(1)
    assert list(run.policies.iterdir()) == []


def test_weights_that_are_not_finite_are_told_as_such(
    learner: Any, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    quant = QuantMap.from_file(QuantMapFile(base="fp8_block"), learner.model_config.num_layers, None)
    weight = next(one for one in learner.model[0].module.decoder.parameters() if one.dim() == 2)
    before = weight.detach().clone()
    monkeypatch.setattr(ProbeScorer, "score", lambda *_: (None, {}))
    with torch.no_grad():
        weight[0, 0] = torch.nan
    try:
        with pytest.raises(NonFiniteError, match="weights cannot be published: model"):
            channel(learner, run, Recorder(), quant).publish(1)
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert list(run.policies.iterdir()) == []


def test_a_kill_while_it_deletes_leaves_no_half_of_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in range(4):
        (tmp_path / f"{version:06d}").mkdir()
        (tmp_path / f"{version:06d}" / "weights").touch()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, published=3, keep=1)
    assert numbered_folders(tmp_path) == [0, 2, 3]
    prune(tmp_path, published=3, keep=1)
    assert numbered_folders(tmp_path) == [2, 3]


def test_what_cannot_be_deleted_is_left_to_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, a file that a reader has open leaves its folder not empty. The version is published by then."""

    def not_empty(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    for version in range(2):
        (tmp_path / f"{version:06d}").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", not_empty)
        prune(tmp_path, published=1, keep=0)
    assert numbered_folders(tmp_path) == [1]
    assert len(remove_leftovers(tmp_path, unfenced)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]


def test_what_a_kept_version_is_made_from_is_kept(tmp_path: Path) -> None:
    """1 whole, deltas 2 and 3, 4 whole with a delta, deltas 5 and 6."""
    tensors = drawn(0, count=10)
    write_version(tmp_path, 1, tensors)
    for version in range(2, 7):
        before, tensors = tensors, moved(tensors, version)
        write_version(tmp_path, version, tensors, base=(version - 1, before), whole=version == 4)
    prune(tmp_path, published=6, keep=3)
    assert numbered_folders(tmp_path) == [1, 2, 3, 4, 5, 6]
    prune(tmp_path, published=6, keep=1)
    assert numbered_folders(tmp_path) == [4, 5, 6]
