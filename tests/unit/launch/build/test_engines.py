"""What of a recipe reaches an engine's command line, and which engines are refused before any starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.build import engines
from launch.build.engines import check_engines, engine_dtype, engine_spec
from pipeline.config.loader import load_recipe, recipe_from
from pipeline.config.recipe import Recipe
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError
from rollout_sglang.server.start import command


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
    return command(engine_spec(run, recipe, 0, 1234, "key", log=None), cuda=False)


def test_both_engines_multiply_the_head_alike(tmp_path: Path) -> None:
    assert "--enable-fp32-lm-head" in argv(tmp_path / "with", fp32_lm_head=True)
    assert "--enable-fp32-lm-head" not in argv(tmp_path / "without", fp32_lm_head=False)


def test_extra_arguments_come_last(tmp_path: Path) -> None:
    assert argv(tmp_path, fp32_lm_head=True)[-2:] == ["--mem-fraction-static", "0.5"]


def recipe_of(
    learner: str = "fp32", rollout: str = "fp32", channel: str = "disk", extra: tuple[str, ...] = ()
) -> Recipe:
    data = dict(
        run=dict(name="run", steps=1),
        model=dict(path="m"),
        task=dict(name="sort_digits"),
        learner=dict(precision=learner),
        rollout=dict(precision=rollout, extra_args=list(extra)),
        weights=dict(channel=channel),
    )
    return recipe_from(data, source="test")


@pytest.mark.parametrize(
    ("learner", "rollout", "cuda", "dtype"),
    [
        ("fp32", "fp32", False, "float32"),
        ("fp32", "fp32", True, "float32"),
        ("fp32", "fp8_block", False, "float32"),
        ("fp32", "fp8_block", True, "bfloat16"),
        ("fp32", "bf16", False, "bfloat16"),
        ("bf16", "fp8_block", False, "bfloat16"),
        ("bf16", "fp32", False, "bfloat16"),
        ("fp8_block", "fp8_block", True, "bfloat16"),
    ],
)
def test_what_is_not_quantized_is_in_the_learners_dtype(
    monkeypatch: pytest.MonkeyPatch, learner: str, rollout: str, cuda: bool, dtype: str
) -> None:
    monkeypatch.setattr(engines, "has_cuda", lambda: cuda)
    assert engine_dtype(recipe_of(learner, rollout)) == dtype


@pytest.mark.parametrize("channel", ["broadcast", "ipc"])
def test_an_old_sglang_that_quantizes_is_sent_no_tensors(monkeypatch: pytest.MonkeyPatch, channel: str) -> None:
    monkeypatch.setattr(engines, "require_sglang", lambda: "0.5.17")
    with pytest.raises(RecipeError, match=rf"weights\.channel is {channel}: SGLang 0\.5\.17 cannot"):
        check_engines(recipe_of(rollout="fp8_tensor", channel=channel))
    check_engines(recipe_of(rollout="fp8_tensor", channel="disk"))
    check_engines(recipe_of(rollout="fp8_block", channel=channel))
    monkeypatch.setattr(engines, "require_sglang", lambda: "0.5.23")
    check_engines(recipe_of(rollout="fp8_tensor", channel=channel))


def test_the_recipe_for_one_gpu_is_refused_on_a_cpu_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(Path(__file__).parents[4] / "pipeline" / "recipes" / "one_gpu.yaml")
    monkeypatch.setattr(engines, "require_sglang", lambda: "0.5.17")
    monkeypatch.setattr(engines, "has_cuda", lambda: False)
    with pytest.raises(
        RecipeError, match=r"--attention-backend triton, --fp8-gemm-backend triton, for a CUDA GPU"
    ) as no:
        check_engines(recipe)
    assert "\n" not in str(no.value)
    monkeypatch.setattr(engines, "has_cuda", lambda: True)
    check_engines(recipe)


def test_a_cpu_takes_what_a_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "has_cuda", lambda: False)
    check_engines(recipe_of(extra=("--attention-backend=torch_native", "--mem-fraction-static", "0.3")))
