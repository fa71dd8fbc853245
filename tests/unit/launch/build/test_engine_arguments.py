"""SGLang's arguments in a recipe that contradict it are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.build.engines import check_engines
from pipeline.config.loader import recipe_from
from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError
from rollout_sglang.server.start import EngineSpec, command


def recipe_of(*extra_args: str, fp32_lm_head: bool = False, **weights: Any) -> Recipe:
    data = dict(
        run=dict(name="run", steps=1),
        model=dict(path="m", fp32_lm_head=fp32_lm_head),
        task=dict(name="sort_digits"),
        rollout=dict(extra_args=list(extra_args), precision="fp32"),
        learner=dict(precision="fp32"),
        weights=weights,
    )
    return recipe_from(data, source="test")


def set_by_us(tmp_path: Path) -> list[str]:
    """The arguments with which an engine of two hosts is started, but for those that say the same as any other value
    would, or that are a recipe's to choose."""
    spec = EngineSpec(
        model=tmp_path, port=1, precision="fp8_tensor", dtype="bfloat16", log=None, version=0, nodes=2, rendezvous="a:1"
    )
    harmless = {"--sleep-on-idle", "--log-level-http"}
    return [argument for argument in command(spec, cuda=True) if argument.startswith("--") and argument not in harmless]


def test_none_that_the_program_sets_is_replaced(tmp_path: Path) -> None:
    names = set_by_us(tmp_path)
    assert {"--model-path", "--port", "--tp-size", "--dtype", "--quantization"} <= set(names)
    for name in names:
        for written in ([name, "7"], [f"{name}=7"]):
            with pytest.raises(
                RecipeError, match=rf"extra_args has {name}, which would replace .*; leave it out"
            ) as no:
                check_engines(recipe_of("--mem-fraction-static", "0.5", *written))
            assert "\n" not in str(no.value)


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("--model", "model.path"),
        ("--tp", "rollout.tensor_parallel"),
        ("--tensor-parallel-size", "rollout.tensor_parallel"),
        ("--nccl-init-addr", "launcher"),
        ("--preferred-sampling-params", "rollout.temperature"),
    ],
)
def test_other_names_of_them_are_known(argument: str, instead: str) -> None:
    with pytest.raises(RecipeError, match=rf"has {argument}, which would replace .*{instead}"):
        check_engines(recipe_of(argument, "2"))


def test_both_sides_multiply_the_head_alike() -> None:
    with pytest.raises(RecipeError, match=r"of which the learner knows nothing; set model\.fp32_lm_head"):
        check_engines(recipe_of("--enable-fp32-lm-head"))
    check_engines(recipe_of("--enable-fp32-lm-head", fp32_lm_head=True))


@pytest.mark.parametrize("argument", ["--dp", "--dp-size", "--data-parallel-size", "--pp-size", "--pp"])
def test_tensors_are_sent_to_one_copy(argument: str) -> None:
    """SGLang asserts it with the first tensor: the run would end at its first publish."""
    for channel in ("broadcast", "ipc"):
        with pytest.raises(RecipeError, match=rf"has {argument} 2, but weights\.channel {channel} sends tensors"):
            check_engines(recipe_of(argument, "2", channel=channel))
        check_engines(recipe_of(f"{argument}=1", channel=channel))
    check_engines(recipe_of(argument, "2", channel="disk"))


def test_speculation_needs_caches_that_are_read_again() -> None:
    given = ("--speculative-algorithm", "NGRAM")
    with pytest.raises(RecipeError, match=r"--speculative-algorithm NGRAM, and weights\.kv_cache is keep: .*recompute"):
        check_engines(recipe_of(*given, kv_cache="keep"))
    check_engines(recipe_of(*given, kv_cache="recompute"))


def test_what_concerns_memory_and_kernels_is_the_recipes_to_choose() -> None:
    check_engines(recipe_of("--mem-fraction-static", "0.5", "--max-total-tokens=4096", "--disable-cuda-graph"))
