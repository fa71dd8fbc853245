"""Whatever lies where a file of the run should be: `evenkeel repair` reads little of it, and names it in a line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.repair import Plan, apply, find_damage, plan_repair
from tests.support.whole_runs import finish, whole_run

NOT_OURS = [
    "x",
    "x.json",
    "x.yaml",
    "x-old.npy",
    "x.npy",
    "x.lost.json",
    "x.zarr.zip",
    "٠٠٠٠٠٣.json",
    "000003.bak",
    "-1",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = whole_run(tmp_path_factory.mktemp("whole"), controlled=True)
    finish(run)
    return run.path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> RunDirectory:
    shutil.copytree(whole, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def plan_of(run: RunDirectory) -> Plan:
    return plan_repair(run, find_damage(run), "now")


@pytest.mark.parametrize(
    "folder",
    [
        *("batches", "checkpoints", "policy", "policy/PUBLISHED", "logprobs", "mismatch", "evaluations", "control"),
        *("quant_maps", "epochs", "engines", "finished", "model"),
    ],
)
def test_names_that_are_not_ours_are_passed_over(run: RunDirectory, folder: str) -> None:
    (run.path / folder).mkdir(exist_ok=True)
    for number, name in enumerate(NOT_OURS):
        path = run.path / folder / name
        path.mkdir() if number % 2 else path.write_text("not ours")
    assert find_damage(run) == []
    assert run.evaluated_versions() == {0, 2, 4}
    assert BatchStore(run.batches).holes(8) == []


@pytest.mark.parametrize(
    "name",
    [
        *("batches/000900.zarr.zip", "batches/999999999999999999.zarr.zip", "batches/000900.lost.json"),
        *("policy/PUBLISHED/000900", "policy/PUBLISHED/999999999999999999"),
    ],
)
def test_a_number_behind_the_last_step_is_of_another_run(run: RunDirectory, name: str) -> None:
    """It was taken for a hole of 894 batches, or for a version that had learned from all."""
    (run.path / name).write_text("not ours")
    [repair] = plan_of(run).repairs
    assert repair.path == run.path / name
    assert repair.becomes == "set aside: it is not of this run"
    apply(run, plan_of(run))
    assert find_damage(run) == []
    assert run.published_version() == 5
