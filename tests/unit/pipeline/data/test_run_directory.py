"""A run directory knows which version of Even Keel it belongs to, and says so in one line."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from launch.cli import app
from pipeline.config.recipe import Recipe
from pipeline.data import files
from pipeline.data.checksums import read_sealed, seal
from pipeline.data.epochs import claim, newest
from pipeline.data.files import remove_leftovers, remove_old_leftovers, temporary_name
from pipeline.data.run_directory import RunDirectory, numbered_folders
from pipeline.data.run_recipes import RUN_FORMAT, begin_recipe
from pipeline.data.store import BatchStore
from pipeline.errors import RecipeError, RunConflictError, StoreError, SupersededError
from tests.support.runs import a_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return a_recipe(tmp_path, run=dict(name="demo", steps=2), model=dict(path="nowhere"))


@pytest.fixture
def former(recipe: Recipe) -> Path:
    """A run directory of an earlier format."""
    begin_recipe(recipe.directory, recipe)
    (recipe.directory / "FORMAT").write_text(seal(f"{RUN_FORMAT - 1}\n"))
    return recipe.directory


def test_a_frozen_run_is_read_and_resumed(recipe: Recipe) -> None:
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    assert read_sealed(run.path / "FORMAT", "") == f"{RUN_FORMAT}\n"
    assert run.freeze(recipe) == run.recipe() == recipe
    with pytest.raises(RunConflictError, match=r"run.seed: 0 → 1"):
        run.freeze(recipe.model_copy(update=dict(run=recipe.run.model_copy(update=dict(seed=1)))))


@pytest.mark.parametrize(
    "command",
    [
        ("train", "--replay"),
        ("repair",),
        ("runs", "show"),
        ("report",),
        ("verify", "history"),
        ("trajectories", "show", "RUN", "0"),
        ("export", "RUN", "--to", "tensorboard"),
        ("mismatch",),
    ],
)
def test_commands_that_work_on_a_run_refuse_a_run_of_an_earlier_version_in_one_line(
    former: Path, command: tuple[str, ...]
) -> None:
    arguments = [str(former) if word == "RUN" else word for word in command]
    arguments += [] if "RUN" in command else [str(former)]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, StoreError), error
    assert str(error).startswith(
        f"{former} was made by an earlier version of Even Keel (run format {RUN_FORMAT - 1}, this version reads"
    )
    assert "start a new run" in str(error)
    assert "\n" not in str(error)
    assert sorted(path.name for path in former.iterdir()) == ["FORMAT", "recipe.yaml"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (seal("99\n"), "made by a later version"),
        (seal("4\n"), r"made by an earlier version of Even Keel \(run format 4"),
        (f"{RUN_FORMAT}\n", "FORMAT is damaged"),
        ("two\n", rf"FORMAT is damaged .* write {RUN_FORMAT}\\n# crc32 [0-9a-f]{{8}}\\n into it"),
    ],
)
def test_other_formats_are_named(recipe: Recipe, text: str, said: str) -> None:
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    (run.path / "FORMAT").write_text(text)
    with pytest.raises(StoreError, match=said):
        run.recipe()
    (run.path / "FORMAT").unlink()
    with pytest.raises(StoreError, match=r"FORMAT is missing; if this version .* write .*# crc32"):
        run.recipe()


def test_what_is_no_run_or_damaged_is_said(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(StoreError, match="is not a run directory"):
        RunDirectory(tmp_path).recipe()
    with pytest.raises(StoreError, match="is not a run directory: it has no recipe") as long:
        RunDirectory(Path("9" * 9999)).recipe()
    assert len(str(long.value)) < 500
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    (run.path / "recipe.yaml").write_text(seal("run: [\n"))
    with pytest.raises(RecipeError, match=r"recipe.yaml is damaged"):
        run.recipe()
    (run.path / "recipe.yaml").write_text(recipe.to_yaml())
    with pytest.raises(StoreError, match=r"recipe.yaml is damaged .*does not end in its checksum") as refused:
        run.recipe()
    line = str(refused.value).rpartition("its last line must be: ")[2]
    (run.path / "recipe.yaml").write_text(f"{recipe.to_yaml()}{line}\n")
    assert run.recipe() == recipe, "changed by hand, on purpose"


def test_of_two_that_start_a_run_at_once_one_wins_and_the_other_compares(recipe: Recipe) -> None:
    seeds = [recipe.model_copy(update=dict(run=recipe.run.model_copy(update=dict(seed=n)))) for n in range(4)]

    def freeze(wanted: Recipe) -> str:
        try:
            return str(RunDirectory(recipe.directory).freeze(wanted).run.seed)
        except RunConflictError as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        said = list(threads.map(freeze, [recipe, *seeds[1:]]))
    won = RunDirectory(recipe.directory).recipe().run.seed
    assert said[won] == str(won)
    assert all(f"run.seed: {won} → {seed}" in said[seed] for seed in range(4) if seed != won)


def test_what_is_published_is_waited_for_a_moment(recipe: Recipe) -> None:
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    writer = threading.Timer(0.1, run.set_published, [7])
    writer.start()
    assert run.published_version() == 7
    writer.join()
    (run.published / "000007").unlink()
    with pytest.raises(StoreError, match="names no version; start the run with"):
        run.published_version()


def test_what_is_published_never_falls(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner was frozen after its check, just before version 2 got its name; it thaws when 6 is published."""
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    for version in (0, 1):
        run.set_published(version)
    frozen = run.under(claim(recipe.directory, "learner"))
    link = os.link

    def thaws_late(temporary: Path, path: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        claim(recipe.directory, "learner")
        for version in (2, 3, 4, 5, 6):
            run.set_published(version)
        link(temporary, path)

    monkeypatch.setattr(os, "link", thaws_late)
    frozen.set_published(2)
    assert run.published_version() == 6
    assert sorted(path.name for path in run.published.iterdir()) == ["000002", "000004", "000005", "000006"]
    run.set_published(7)
    assert sorted(path.name for path in run.published.iterdir()) == ["000005", "000006", "000007"]


def test_a_damaged_announcement_is_refused(recipe: Recipe) -> None:
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    run.set_published(7)
    (run.published / "000007").write_text("8\n")
    with pytest.raises(StoreError, match=r"000007 is damaged .* `evenkeel repair"):
        run.published_version()
    (run.published / "000007").rename(run.published / "000008")
    (run.published / "000008").write_text(seal("7\n"))
    with pytest.raises(StoreError, match="000008 says version 7"):
        run.published_version()


def test_what_a_superseded_process_writes_is_refused(recipe: Recipe) -> None:
    RunDirectory(recipe.directory).freeze(recipe)
    thawed = RunDirectory(recipe.directory).under(claim(recipe.directory, "learner"))
    thawed.set_published(1)
    assert thawed == RunDirectory(recipe.directory)
    claim(recipe.directory, "learner")
    writes = (
        lambda: thawed.set_published(2),
        lambda: thawed.write_logprobs(0, np.zeros(1, np.float32)),
        lambda: thawed.write_logprobs(0, np.zeros(1, np.float32), old=True),
        lambda: thawed.write_evaluation(2, {}),
        lambda: thawed.set_finished("learner"),
    )
    for write in writes:
        with pytest.raises(SupersededError):
            write()
    assert thawed.published_version() == 1
    assert not any(thawed.logprobs.iterdir())
    assert not thawed.evaluated_versions()
    assert not thawed.is_finished()


def test_leftovers_are_removed_by_the_newest_start_alone(tmp_path: Path) -> None:
    old = claim(tmp_path, "learner")
    for name in (".000012.host-0123456789ab.tmp", ".PUBLISHED.host-0123456789ac.tmp", "000012", ".hidden"):
        (tmp_path / "policy" / name).mkdir(parents=True)
    new = claim(tmp_path, "learner")
    with pytest.raises(SupersededError):
        remove_leftovers(tmp_path / "policy", old.check)
    assert len(remove_leftovers(tmp_path / "policy", new.check)) == 2
    assert sorted(path.name for path in (tmp_path / "policy").iterdir()) == [".hidden", "000012"]


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_folder_that_was_there_is_made_durable_once_if_one_of_ours_can_have_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    synced = list[Path]()
    monkeypatch.setattr(files, "fsync_directory", synced.append)
    monkeypatch.setattr(files.os, "access", lambda folder, mode: is_ours)
    for _ in range(2):
        files.make_folder(tmp_path / "a" / "b")
        files.make_folder(tmp_path / "a" / "c")
    assert synced == [*[tmp_path.parent] * is_ours, tmp_path, tmp_path / "a", tmp_path / "a"]


def test_old_temporary_files_and_folders_go_and_young_ones_stay(tmp_path: Path) -> None:
    paths = [temporary_name(tmp_path / name) for name in ("stale", "stale-folder", "young", "young-folder")]
    for path in paths:
        if "folder" in path.name:
            path.mkdir()
        inner = path / "shard" if path.is_dir() else path
        inner.touch()
        if "stale" in path.name:
            for one in (inner, path):
                os.utime(one, (1.0, 1.0))
    os.utime(paths[3], (1.0, 1.0))  # what is being written into it says that it is young
    remove_old_leftovers([tmp_path])
    assert {path.name for path in tmp_path.iterdir()} == {paths[2].name, paths[3].name}


@pytest.mark.parametrize(
    "stranger",
    ["000003.bak", "٠٠٠٠٠٤", "0000000005", "9" * 200, "000006 ", "+00007", "-00008", ".000009", "a\nb", "00010"],
)
def test_names_that_are_no_numbers_of_ours_are_left_alone(tmp_path: Path, stranger: str) -> None:
    for name in ("000001", "1000000", stranger):
        (tmp_path / name).mkdir()
    assert numbered_folders(tmp_path) == [1, 1_000_000]
    assert newest(tmp_path) == 1_000_000  # starts of a role
    store = BatchStore(tmp_path)
    (tmp_path / "000002.zarr.zip").touch()
    (tmp_path / f"{stranger}.zarr.zip").touch() if len(stranger) < 200 else None
    assert store.committed() == [2]
