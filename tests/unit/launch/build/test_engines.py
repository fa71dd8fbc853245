"""What of a recipe reaches an engine's command line, and which engines are refused before any starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.build import engines
from launch.build.components import build_quant_map, build_sampling
from launch.build.engines import check_engines, engine_dtype, engine_spec, served_formats
from launch.convert.new_model import new_model
from launch.plan.planner import make_plan
from pipeline.config.recipe import Recipe
from pipeline.data.checksums import write_sealed
from pipeline.data.quant_maps import write_quant_map
from pipeline.data.routed_experts import ExpertShape
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError, StoreError
from precision.formats.quant_map import QuantMapFile
from rollout_sglang.server.rollout_python import PYTHON_VARIABLE
from rollout_sglang.server.start import command
from tests.support.runs import a_recipe


def argv(
    tmp_path: Path, *, fp32_lm_head: bool = False, replay_experts: bool = False, seed: int = 0, index: int = 0
) -> list[str]:
    recipe = a_recipe(
        tmp_path,
        run=dict(name="run", steps=1, seed=seed),
        model=dict(path=str(tmp_path), fp32_lm_head=fp32_lm_head),
        rollout=dict(extra_args=["--mem-fraction-static", "0.5"], replay_experts=replay_experts),
    )
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    run.policy_directory(0).mkdir(parents=True)
    (run.policy_directory(0) / "manifest.json").write_text("{}")
    run.set_published(0)
    return command(engine_spec(run, recipe, index, 1234, "key", log=None), cuda=False)


def test_both_engines_multiply_the_head_alike(tmp_path: Path) -> None:
    assert "--enable-fp32-lm-head" in argv(tmp_path / "with", fp32_lm_head=True)
    assert "--enable-fp32-lm-head" not in argv(tmp_path / "without", fp32_lm_head=False)


def test_engines_record_the_experts_that_are_to_be_replayed(tmp_path: Path) -> None:
    assert "--enable-return-routed-experts" in argv(tmp_path / "with", replay_experts=True)
    assert "--enable-return-routed-experts" not in argv(tmp_path / "without")


def replaying(tmp_path: Path, **sizes: int) -> Recipe:
    new_model(tmp_path / "model", **sizes)  # type: ignore[arg-type]
    return a_recipe(
        run=dict(name="run", steps=1), model=dict(path=str(tmp_path / "model")), rollout=dict(replay_experts=True)
    )


def test_experts_of_a_mixture_alone_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "has_cuda", lambda: False)
    with pytest.raises(RecipeError, match=r"replay_experts is true, but .*Qwen3ForCausalLM\) has no experts"):
        check_engines(replaying(tmp_path / "dense"))
    mixture = replaying(tmp_path / "mixture", experts=4, experts_per_token=2, expert_ffn=16, layers=3)
    check_engines(mixture)
    shape = ExpertShape(num_layers=3, moe_layers=(0, 1, 2), num_experts=4, per_token=2)
    assert build_sampling(mixture).experts == shape
    assert build_sampling(mixture, temperature=0.5).experts is None
    monkeypatch.setattr(engines, "require_sglang", lambda: "0.5.22")
    with pytest.raises(RecipeError, match=r"SGLang 0\.5\.22 is older than 0\.5\.23"):
        check_engines(mixture)


def test_a_broadcast_between_two_releases_of_nccl_is_refused_by_the_start_and_by_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"sglang": "0.5.23", "nvidia-nccl-cu13": "2.30.7"}\'\n')
    python.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))
    monkeypatch.setattr(engines, "has_cuda", lambda: True)
    here, asked = "2.28.9", engines.package_version
    monkeypatch.setattr(engines, "package_version", lambda *names, **of: here if of.get("here") else asked(*names))
    check_engines(recipe_of(channel="disk"))
    refused = r"broadcast, with NCCL 2\.30\.7 in the engines' torch and 2\.28\.9 in the learner's"
    with pytest.raises(RecipeError, match=refused):
        check_engines(recipe_of(channel="broadcast"))
    with pytest.raises(RecipeError, match=refused):
        make_plan(Path("qwen3_32b"), [], {}, gpus=64, gpu_gib=80)
    here = "2.30.7"
    check_engines(recipe_of(channel="broadcast"))


def recipe_of(
    learner: str = "fp32", rollout: str = "fp32", channel: str = "disk", extra: tuple[str, ...] = ()
) -> Recipe:
    return a_recipe(
        run=dict(name="run", steps=1),
        learner=dict(precision=learner),
        rollout=dict(precision=rollout, extra_args=list(extra)),
        weights=dict(channel=channel),
    )


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
    monkeypatch.setattr(engines, "has_cuda", lambda: False)
    monkeypatch.setattr(engines, "require_sglang", lambda: "0.5.17")
    with pytest.raises(RecipeError, match=rf"weights\.channel is {channel}: SGLang 0\.5\.17 cannot"):
        check_engines(recipe_of(rollout="fp8_tensor", channel=channel))
    check_engines(recipe_of(rollout="fp8_tensor", channel="disk"))
    check_engines(recipe_of(rollout="fp8_block", channel=channel))
    monkeypatch.setattr(engines, "require_sglang", lambda: "0.5.23")
    check_engines(recipe_of(rollout="fp8_tensor", channel=channel))


def test_weights_that_a_gpu_engine_quantizes_itself_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next version could not be loaded over them, by whatever channel it comes."""
    monkeypatch.setattr(engines, "require_sglang", lambda: "0.5.23")
    monkeypatch.setattr(engines, "has_cuda", lambda: True)
    for channel in ("disk", "broadcast"):
        with pytest.raises(RecipeError, match=r"precision is fp8_tensor, .* cannot load .*; set fp8_block") as no:
            check_engines(recipe_of("bf16", "fp8_tensor", channel=channel))
        assert "\n" not in str(no.value)
        check_engines(recipe_of("bf16", "fp8_block", channel=channel))
    monkeypatch.setattr(engines, "has_cuda", lambda: False)
    check_engines(recipe_of("bf16", "fp8_tensor"))


def mapped(tmp_path: Path, precision: str, quant_map: QuantMapFile) -> Recipe:
    if not (tmp_path / "model").exists():
        new_model(tmp_path / "model", layers=2)
    return a_recipe(
        tmp_path,
        run=dict(name="run", steps=1),
        model=dict(path=str(tmp_path / "model")),
        rollout=dict(precision=precision, quant_map=quant_map.model_dump()),
        learner=dict(precision="fp32"),
    )


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("precision", ["fp8_block", "fp8_tensor"])
def test_an_engine_is_told_the_map_of_the_folder_that_it_starts_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr(engines, "has_cuda", lambda: False)
    recipe = mapped(tmp_path, precision, QuantMapFile(base=precision))  # type: ignore[arg-type]
    assert served_formats(recipe, tmp_path) == dict(precision=precision)
    write_quant_map(tmp_path, QuantMapFile(base=precision, exceptions={DOWN: "full"}))  # type: ignore[arg-type]
    assert served_formats(recipe, tmp_path) == dict(precision=precision, full_precision=(DOWN,))
    write_quant_map(tmp_path, QuantMapFile(base="full"))
    assert served_formats(recipe, tmp_path) == dict(precision="fp32")
    write_quant_map(tmp_path, QuantMapFile(base=precision, exceptions={DOWN: "bf16"}))  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"rollout\.quant_map: .*down_proj is bf16, but .* compute in float32"):
        served_formats(recipe, tmp_path)
    write_quant_map(tmp_path, QuantMapFile(base=precision, exceptions={"model.layers.9.mlp.down_proj": "full"}))  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"no linear layer 'model\.layers\.9.*nearest name is model\.layers\."):
        served_formats(recipe, tmp_path)
    write_sealed(tmp_path / "quant_map.yaml", "base: [\n")
    with pytest.raises(StoreError, match=r"quant_map\.yaml: line .*not YAML"):
        served_formats(recipe, tmp_path)


def test_a_recipes_map_is_checked_against_the_model_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"rollout\.quant_map: .*no linear layer 'down_proj'"):
        build_quant_map(mapped(tmp_path, "fp8_block", QuantMapFile(base="fp8_block", exceptions={"down_proj": "full"})))
    found = build_quant_map(mapped(tmp_path, "fp8_block", QuantMapFile(base="fp8_block", exceptions={DOWN: "full"})))
    assert found is not None
    assert found.ignored_layers() == (DOWN,)


def test_an_fp8_cache_without_scales_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda in (True, False):
        monkeypatch.setattr(engines, "has_cuda", lambda cuda=cuda: cuda)
        with pytest.raises(RecipeError, match=r"--kv-cache-dtype fp8_e4m3: .* SGLang would take 1\.0 without a word"):
            check_engines(recipe_of(extra=("--kv-cache-dtype=fp8_e4m3",)))
    check_engines(recipe_of(extra=("--kv-cache-dtype", "auto")))
