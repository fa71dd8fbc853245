"""What of a recipe reaches an engine's command line."""

from __future__ import annotations

from pathlib import Path

from launch.engines import engine_spec
from pipeline.recipe_file import recipe_from
from pipeline.rundir import RunDirectory
from rollout_sglang.server import command


def argv(tmp_path: Path, *, fp32_lm_head: bool) -> list[str]:
    data = dict(
        run=dict(name="run", root=str(tmp_path), steps=1),
        model=dict(path=str(tmp_path), fp32_lm_head=fp32_lm_head),
        task=dict(name="sort_digits"),
        rollout=dict(extra_args=["--mem-fraction-static", "0.5"]),
    )
    recipe = recipe_from(data, source="test")
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    run.policy_directory(0).mkdir(parents=True)
    (run.policy_directory(0) / "manifest.json").write_text("{}")
    run.set_published(0)
    return command(engine_spec(run, recipe, 0, 1234, "key"), cuda=False)


def test_both_engines_multiply_the_head_alike(tmp_path: Path) -> None:
    assert "--enable-fp32-lm-head" in argv(tmp_path / "with", fp32_lm_head=True)
    assert "--enable-fp32-lm-head" not in argv(tmp_path / "without", fp32_lm_head=False)


def test_extra_arguments_come_last(tmp_path: Path) -> None:
    assert argv(tmp_path, fp32_lm_head=True)[-2:] == ["--mem-fraction-static", "0.5"]
