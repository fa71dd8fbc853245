"""What a run needs of the machine that it begins on, refused in one line before anything is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.doctor import needs
from launch.doctor.needs import check_folder, check_learner_here, check_model_here, check_room
from pipeline.config.recipe import Recipe
from pipeline.errors import DiskFullError, MachineError, RecipeError
from tests.support.runs import make_model, make_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("needs") / "model")


def recipe_of(folder: Path, model: Path, **sections: dict[str, object]) -> Recipe:
    from pipeline.config.loader import load_recipe

    return load_recipe(make_recipe(folder, model, "needs", **sections))


def test_packages_of_the_learner(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_learner_here(recipe_of(tmp_path, model))
    monkeypatch.setattr("launch.extras.find_spec", lambda package: None if package == "mbridge" else package)
    with pytest.raises(MachineError, match=r"has no mbridge, which the learner needs: pip install mbridge==0.15.1 "):
        check_learner_here(recipe_of(tmp_path, model))


@pytest.mark.parametrize("precision", ["fp8_tensor", "fp8_block", "fp8_delayed"])
def test_fp8_in_hardware(tmp_path: Path, model: Path, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, model, learner=dict(precision=precision))
    monkeypatch.setattr(needs, "has_cuda", lambda: False)
    with pytest.raises(MachineError, match=f"learner.precision is {precision}.*and this machine has none; use fp32"):
        check_learner_here(recipe)
    monkeypatch.setattr(needs, "has_cuda", lambda: True)
    monkeypatch.setattr("launch.extras.find_spec", lambda package: package != "transformer_engine" or None)
    with pytest.raises(MachineError, match=r"no Transformer Engine: pip install 'transformer-engine\[pytorch\]<"):
        check_learner_here(recipe)


def test_sizes_that_come_with_even_keel_hold_no_weights(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.config.loader import SHIPPED, load_recipe

    monkeypatch.chdir(tmp_path)
    for folder in ("models/qwen3-32b", SHIPPED / "models/qwen3-32b"):
        recipe = load_recipe(Path("qwen3_32b"), [f"model.path={folder}"])
        with pytest.raises(RecipeError, match=r"that folder holds no weights; fetch or make .* set model\.path to"):
            check_model_here(recipe)
    check_model_here(load_recipe(Path("qwen3_32b"), ["model.path=/models/qwen3-32b"]))
    check_model_here(recipe_of(tmp_path, model))


def test_a_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(MachineError, match=r"runs is a file; set run.root to a folder"):
        check_folder(tmp_path / "runs/a", "run.root")


def test_a_folder_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # who is root may write everywhere
    with pytest.raises(MachineError, match=f"this user may not write in {tmp_path}; set run.root to another"):
        check_folder(tmp_path / "runs/a", "run.root")


def test_a_file_system_that_is_mounted_read_only() -> None:
    """/proc/sys is, in most containers; elsewhere there may be none."""
    mounted = [Path(line.split()[1]) for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    read_only = [one for one in mounted if one.is_dir() and os.statvfs(one).f_flag & os.ST_RDONLY]
    if not read_only:
        pytest.skip("nothing is mounted read-only here")
    with pytest.raises(MachineError, match="is mounted read-only; set --out to another folder"):
        check_folder(read_only[0] / "evenkeel-no-such-folder", "--out")


def test_a_disk_without_room_for_a_checkpoint(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, model)
    check_room(recipe)
    found = os.statvfs(tmp_path)
    full = os.statvfs_result((found.f_bsize, found.f_frsize, found.f_blocks, 0, 0, *tuple(found)[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(DiskFullError, match="too full for a policy and a checkpoint of run needs: it needs"):
        check_room(recipe)
    (recipe.directory / "checkpoints/000002").mkdir(parents=True)
    (recipe.directory / "checkpoints/000002/COMMIT").touch()
    check_room(recipe)  # what it needs is there already; its own checkpoints ask again
