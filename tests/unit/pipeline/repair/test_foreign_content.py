"""Whatever lies where a file of the run should be: `evenkeel repair` reads little of it, and names it in a line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.data.checksums import seal
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import RecipeError, StoreError
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
HUGE = 4 << 40
"""More than any machine that tests this could read into memory."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = whole_run(tmp_path_factory.mktemp("whole"), controlled=True)
    finish(run)
    return run.path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> RunDirectory:
    shutil.copytree(whole, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def huge(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(HUGE)


def deep(path: Path) -> None:
    path.write_text(seal(f'{{"a": {"[" * 100_000}{"]" * 100_000}}}\n'), encoding="utf-8")


def another_object(path: Path) -> None:
    path.write_text(seal("{}\n"), encoding="utf-8")


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


@pytest.mark.parametrize("name", ["batches", "epochs", "policy", "policy/PUBLISHED", "finished"])
def test_a_file_in_place_of_a_folder_is_named(run: RunDirectory, name: str) -> None:
    shutil.rmtree(run.path / name)
    (run.path / name).write_text("x")
    with pytest.raises(StoreError, match=rf"{name} is no folder; move it elsewhere"):
        find_damage(run)


@pytest.mark.parametrize("name", ["FORMAT", "recipe.yaml"])
@pytest.mark.parametrize("replaced", [as_folder, as_pipe, huge, deep, another_object])
def test_without_format_and_recipe_there_is_no_run(
    run: RunDirectory, name: str, replaced: Callable[[Path], None]
) -> None:
    replaced(run.path / name)
    with pytest.raises((StoreError, RecipeError), match=name) as raised:
        find_damage(run)
    assert len(str(raised.value).splitlines()) == 1
