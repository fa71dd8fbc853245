"""What a run needs of the machine that it begins on, refused in one line before anything is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.run import preflight
from launch.run.preflight import check_folder, check_learner_here, check_model_here, check_room
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
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
    monkeypatch.setattr("pipeline.importing.find_spec", lambda package: None if package == "einops" else package)
    with pytest.raises(MachineError, match=r"has no einops, which the learner needs: pip install 'einops>=0.8' "):
        check_learner_here(recipe_of(tmp_path, model))


@pytest.mark.parametrize("precision", ["fp8_tensor", "fp8_block", "fp8_delayed"])
def test_fp8_in_hardware(tmp_path: Path, model: Path, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, model, learner=dict(precision=precision))
    monkeypatch.setattr(preflight, "has_cuda", lambda: False)
    with pytest.raises(MachineError, match=f"learner.precision is {precision}.*and this machine has none; use fp32"):
        check_learner_here(recipe)
    monkeypatch.setattr(preflight, "has_cuda", lambda: True)
    monkeypatch.setattr("pipeline.importing.find_spec", lambda package: package != "transformer_engine" or None)
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
    with pytest.raises(
        DiskFullError, match=r"too full for \d policies \(weights\.keep\) and \d check.* of run needs: it"
    ):
        check_room(recipe)
    (recipe.directory / "checkpoints/000002").mkdir(parents=True)
    (recipe.directory / "checkpoints/000002/COMMIT").touch()
    check_room(recipe)  # what it needs is there already; its own checkpoints ask again


def test_the_disk_must_have_room_for_all_that_is_kept(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, str]] = []
    monkeypatch.setattr(preflight, "require_space", lambda _, num_bytes, what: asked.append((num_bytes, what)))
    few = recipe_of(tmp_path, model, run=dict(name="needs", root=str(tmp_path), steps=100))
    many = few.model_copy(
        update=dict(
            weights=few.weights.model_copy(update=dict(keep=9)),
            checkpoint=few.checkpoint.model_copy(update=dict(keep=5)),
        )
    )
    short = few.model_copy(update=dict(run=few.run.model_copy(update=dict(steps=1))))
    for recipe in (few, many, short):
        check_room(recipe)
    parameters = ModelConfig.from_hf(read_hf_config(model)).num_parameters
    policy, checkpoint = 4 * parameters, 12 * parameters  # float32, two moments beside
    assert [num_bytes for num_bytes, _ in asked] == [
        4 * policy + 3 * checkpoint,
        11 * policy + 6 * checkpoint,
        2 * policy + checkpoint,
    ]
    assert asked[1][1] == "11 policies (weights.keep) and 6 checkpoints (checkpoint.keep) of run needs"
