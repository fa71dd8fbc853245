"""An engine's own links to the weights that it starts with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launch.roles.engine import hold_weights
from pipeline.data.checksums import list_checksums
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import StoreError
from pipeline.ports.weights import WeightCheck
from rollout_sglang.server.start import EngineSpec


def spec(folder: Path, version: int) -> EngineSpec:
    return EngineSpec(
        model=folder, port=1, precision="fp32", dtype="float32", log=folder / "log", version=version, api_key="key"
    )


def policy(run: RunDirectory, version: int) -> EngineSpec:
    folder = run.policy_directory(version)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(str(version))
    (folder / "model.safetensors").write_text(f"weights {version}")
    WeightCheck(version=version).save(folder)
    list_checksums(folder)
    return spec(folder, version)


def test_weights_outlive_the_policy_that_they_are_of(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    seven = policy(run, 7)
    held = hold_weights(run, 3, 0, 1, lambda: seven)
    shutil.rmtree(seven.model)
    assert (held.model / "model.safetensors").read_text() == "weights 7"
    assert (held.version, held.port) == (7, 1)
    eight = hold_weights(run, 3, 0, 2, lambda: policy(run, 8))
    names = ["SHA256SUMS", "config.json", "model.safetensors", "weight_check.json"]
    assert sorted(path.name for path in eight.model.iterdir()) == names
    assert (eight.model / "config.json").read_text() == "8", "nothing of version 7"
    assert not held.model.exists(), "a new start removes what an earlier one has left"
    assert run.membership().engines() == [], "the folder is no member"
    shutil.rmtree(eight.model)
    assert (run.policy_directory(8) / "model.safetensors").exists()


def test_a_superseded_start_leaves_its_successor_s_weights(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    seven = policy(run, 7)
    old, new, other_host = (
        hold_weights(run, 3, node, start, lambda: seven) for node, start in ((0, 1), (0, 2), (1, 1))
    )
    shutil.rmtree(old.model, ignore_errors=True)
    late = hold_weights(run, 3, 0, 1, lambda: seven)
    shutil.rmtree(late.model)
    assert (new.model / "model.safetensors").exists()
    assert (other_host.model / "model.safetensors").exists()


def test_a_policy_that_is_gone_is_replaced_by_a_newer_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    newest = iter([spec(tmp_path / "gone", 7), policy(run, 8)])
    assert hold_weights(run, 0, 1, 1, lambda: next(newest)).version == 8


def test_no_engine_starts_with_damaged_weights(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    seven = policy(run, 7)
    (seven.model / "model.safetensors").write_text("weights 3")
    with pytest.raises(StoreError, match=r"model\.safetensors is damaged .*stop the run; `evenkeel repair "):
        hold_weights(run, 0, 0, 1, lambda: seven)
    (seven.model / "SHA256SUMS").unlink()
    with pytest.raises(StoreError, match="SHA256SUMS is missing"):
        hold_weights(run, 0, 0, 2, lambda: seven)


def test_no_engine_starts_with_the_weights_of_another_version_under_a_newer_name(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    five, six = policy(run, 5), policy(run, 6)
    shutil.rmtree(six.model)
    shutil.copytree(five.model, six.model)
    with pytest.raises(StoreError, match="holds version 5, expected 6; stop the run and repair it"):
        hold_weights(run, 0, 0, 1, lambda: six)


def test_policies_that_always_go_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"gone, and those before it.*raise weights\.keep"):
        hold_weights(RunDirectory(tmp_path), 0, 0, 1, lambda: spec(tmp_path / "gone", 7))
