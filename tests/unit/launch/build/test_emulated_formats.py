"""Formats that engines on CPUs emulate: what a GPU, a plan, a mixture of experts and an engine are told about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.build import engines
from launch.build.components import build_quant_map
from launch.build.engines import check_engines, served_formats
from launch.convert.new_model import new_model
from launch.plan.hosts import planner_that_fits
from launch.plan.planner import make_plan
from launch.run.preflight import preflight
from pipeline.config.loader import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.data.quant_maps import write_quant_map
from pipeline.errors import RecipeError
from precision.formats.rollout_format import RolloutFormat
from tests.support.runs import a_recipe

EMULATED = [name for name in RolloutFormat if name.is_emulated]


def recipe_of(model: Path, precision: str, **learner: object) -> Recipe:
    return a_recipe(
        run=dict(name="run", steps=1),
        model=dict(path=str(model)),
        rollout=dict(precision=precision, max_new_tokens=8, context_tokens=64),
        learner=dict(precision="fp32", **learner),
    )


@pytest.mark.parametrize("precision", EMULATED)
def test_a_gpu_and_a_plan_for_gpus_refuse_them_in_one_line(
    precision: RolloutFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "require_sglang", lambda: "0.5.23")
    recipe = recipe_of(tmp_path, precision)
    check_engines(recipe)
    monkeypatch.setattr(engines, "has_cuda", lambda: True)
    check_engines(recipe_of(tmp_path, "fp8_block"))
    expected = (
        f"^rollout.precision is {precision}, which engines on CPUs emulate and no GPU of ours serves; set fp8_block"
    )
    with pytest.raises(RecipeError, match=expected):
        check_engines(recipe)
    shipped, override = Path("qwen3_32b"), f"rollout.precision={precision}"
    with pytest.raises(RecipeError, match=expected):
        make_plan(shipped, [override], {}, gpus=8, gpu_gib=80)
    with pytest.raises(RecipeError, match=expected):
        planner_that_fits(shipped, load_recipe(shipped, [override]), gpu_gib=80)


def test_a_mixture_is_refused_before_anything_starts(tmp_path: Path) -> None:
    new_model(tmp_path / "model", experts=4)
    with pytest.raises(RecipeError, match="emulated_fp4, which is emulated in dense models only"):
        preflight(recipe_of(tmp_path / "model", "emulated_fp4"))


@pytest.mark.parametrize("precision", EMULATED)
def test_the_learner_may_follow_and_the_map_is_the_folders(precision: RolloutFormat, tmp_path: Path) -> None:
    new_model(tmp_path / "model")
    recipe = recipe_of(tmp_path / "model", precision, fp8_emulation=True)
    quant_map = build_quant_map(recipe)
    assert quant_map is not None
    assert quant_map.rollout_format is precision
    write_quant_map(tmp_path, quant_map.promoted(["model.layers.0.mlp.down_proj"]).to_file())
    served = served_formats(recipe, tmp_path)
    assert served == dict(precision=precision, full_precision=("model.layers.0.mlp.down_proj",))
