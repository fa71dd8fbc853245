"""A file that is whole is damage all the same where it lies in another's place; and a reader that fails is none."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch.repair import repair_run
from launch.verify.history import check_history
from pipeline.data import store
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import CorruptBatchError, RunConflictError
from pipeline.repair import find_damage, plan_repair
from tests.support.whole_runs import damage, finish, whole_run

STAGED = dict(kind="staged", updates_per_stage=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("whole"), schedule=STAGED, controlled=False).path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> RunDirectory:
    shutil.copytree(whole, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


@pytest.mark.parametrize(
    ("taken", "place"),
    [
        ("batches/000001.zarr.zip", "batches/000005.zarr.zip"),
        ("logprobs/000001-old.npy", "logprobs/000003-old.npy"),
        ("evaluations/000000.json", "evaluations/000004.json"),
        ("policy/PUBLISHED/000005", "policy/PUBLISHED/000006"),
        ("policy/000004", "policy/000005"),
        ("checkpoints/000002", "checkpoints/000004"),
    ],
)
def test_what_is_of_another_number_is_named_by_repair_and_by_history(run: RunDirectory, taken: str, place: str) -> None:
    source, target = run.path / taken, run.path / place
    if source.is_dir():
        shutil.rmtree(target)
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
    named = [str(one.path.relative_to(run.path)) for one in find_damage(run)]
    assert place in named
    assert all(name == place or name.startswith("checkpoints/") for name in named), "which may need it"
    if not place.startswith("batches"):  # of which history names the first, and ends
        assert str(target) in [line.partition(": ")[0] for line in check_history(run.path)["damaged"]]


def test_a_batch_of_another_run_is_named(run: RunDirectory, tmp_path: Path) -> None:
    other = whole_run(tmp_path / "other", schedule=STAGED)
    shutil.copyfile(other.batches / "000002.zarr.zip", run.batches / "000002.zarr.zip")
    [found] = find_damage(run)
    assert (found.kind, found.number) == ("batch", 2)
    assert "a batch of another run" in found.problem
    assert not check_history(run.path)["ok"]


@pytest.mark.parametrize(
    "name",
    [
        *("batches/000005.zarr.zip", "policy/000005", "evaluations/000004.json", "engines/000000.json", "recipe.yaml"),
        *("epochs/learner/000001", "FORMAT", "policy/PUBLISHED/000005", "checkpoints/000004"),
    ],
)
def test_history_and_repair_name_the_same_damage(run: RunDirectory, name: str) -> None:
    """They had a list each: repair took a run for whole whose epochs were not."""
    damage(run.path / name)
    said = [
        _said(lambda: check_history(run.path)["damaged"]),
        _said(lambda: repair_run(run.path, do=False, stopped=True)),
    ]
    assert all(re.search(re.escape(name), each) for each in said), said


def _said(ask: Any) -> str:
    try:
        return str(ask())
    except Exception as error:  # noqa: BLE001 - what a command prints
        return str(error)


@pytest.mark.parametrize("finished", [False, True])
def test_the_newest_checkpoint_that_is_gone_is_named(tmp_path: Path, finished: bool) -> None:
    run = whole_run(tmp_path, saved=(2, 4, 6), published=6, policies=(6,), steps=6 if finished else 8)
    if finished:
        finish(run)
    shutil.rmtree(run.checkpoints / "000006")
    found = check_history(run.path)
    assert found["without_record"]["checkpoints"] == [6]
    assert not found["ok"]


def failing(error: Exception) -> Any:
    def read(*_: object, **__: object) -> None:
        raise error

    return read


def test_a_reader_that_fails_over_whole_bytes_reports_no_damage(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a new version of a library would: every batch was "damaged", and repair would have recorded all as lost."""
    monkeypatch.setattr(store, "read_batch", failing(TypeError("decode() takes 2 arguments")))
    with pytest.raises(TypeError, match="takes 2 arguments"):
        BatchStore(run.batches).read(1, None)
    with pytest.raises(TypeError, match="takes 2 arguments"):
        find_damage(run)
    damage(run.batches / "000001.zarr.zip")
    with pytest.raises(CorruptBatchError, match="fails its checks"):
        BatchStore(run.batches).read(1, None)


def test_a_plan_in_which_most_files_fail_alike_is_refused(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "read_batch", failing(ValueError("codec 7 is unknown")))
    with pytest.raises(
        RunConflictError, match=r"6 of 6 files in .*batches fail alike .*codec # is unknown.*nothing is"
    ):
        plan_repair(run, find_damage(run), "now")
    assert sorted(path.name for path in run.batches.iterdir()) == [f"{index:06}.zarr.zip" for index in range(6)]
