"""SGLang's arguments in a recipe that contradict it are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.build.engines import check_engines, check_extra_args, gives_secret
from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError
from rollout_sglang.server.start import EngineSpec, command
from tests.support.runs import a_recipe


def recipe_of(*extra_args: str, fp32_lm_head: bool = False, **weights: Any) -> Recipe:
    return a_recipe(
        run=dict(name="run", steps=1),
        model=dict(path="m", fp32_lm_head=fp32_lm_head),
        rollout=dict(extra_args=list(extra_args), precision="fp32"),
        learner=dict(precision="fp32"),
        weights=weights,
    )


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


def teaching(*extra_args: str) -> Recipe:
    return a_recipe(run=dict(name="run", steps=1), distillation=dict(path="t", extra_args=list(extra_args)))


@pytest.mark.parametrize(
    "name",
    [
        *("--api-key", "--api-k", "--ap", "--admin-api-key", "--admin", "--ssl-keyfile-password", "--ssl-keyfile-pass"),
        *("--watermark-key", "--hub-token", "--client-secret", "--redis-password"),
    ],
)
def test_secrets_are_given_by_no_argument(name: str) -> None:
    """A recipe is kept, and every user of a machine can read a command line."""
    for written in ([name, "opensesame"], [f"{name}=opensesame"]):
        for recipe, section in ((recipe_of(*written), "rollout"), (teaching(*written), "distillation")):
            with pytest.raises(RecipeError, match=rf"^{section}\.extra_args has {name}, .*EVENKEEL_API_KEY") as no:
                check_extra_args(recipe)
            assert "\n" not in str(no.value)
            assert "opensesame" not in str(no.value)


@pytest.mark.parametrize(
    "argument",
    [
        *("--max-total-tokens=4096", "--tokenizer-path", "--tokenizer-worker-num", "--ssl-keyfile", "--ssl-certfile"),
        *("--chunked-prefill-size", "--skip-tokenizer-init", "--speculative-num-draft-tokens", "--max-prefill-tokens"),
        *("--bucket-time-to-first-token", "--kt-max-deferred-experts-per-token", "--tokenizer-mode", "token", "--"),
    ],
)
def test_harmless_names_are_no_secrets(argument: str) -> None:
    assert not gives_secret(argument)
    check_extra_args(recipe_of(argument))
    check_extra_args(teaching(argument))


@pytest.mark.parametrize(
    ("argument", "whole"),
    [
        ("--hos=0.0.0.0", "--host"),
        ("--mod", "--model-path"),
        ("--dtyp", "--dtype"),
        ("--tensor-par", "--tp|--tensor-parallel-size"),
        ("--conf", "--config"),
        ("--dat=2", "--data-parallel-size"),
        ("--enable-fp32-lm", "--enable-fp32-lm-head"),
        ("--kv-cache-dt=fp8_e4m3", "--kv-cache-dtype"),
        ("--base-gpu=4", "--base-gpu-id"),
    ],
)
def test_the_beginning_of_a_name_is_the_name(argument: str, whole: str) -> None:
    """SGLang's parser takes it for the name."""
    name = argument.partition("=")[0]
    with pytest.raises(RecipeError, match=rf"has {name}, short for ({whole})[,;] "):
        check_extra_args(recipe_of(argument))


def test_no_file_of_arguments_is_read() -> None:
    for recipe, section in (
        (recipe_of("--config", "more.yaml"), "rollout"),
        (teaching("--config=more.yaml"), "distillation"),
    ):
        with pytest.raises(RecipeError, match=rf"{section}\.extra_args has --config, a file .*list them there"):
            check_extra_args(recipe)


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("--host=0.0.0.0", "loopback"),
        ("--hos=0.0.0.0", "loopback"),
        ("--port=1", "free port"),
        ("--model-path=x", "distillation.path"),
        ("--tp-size=2", "distillation.tensor_parallel"),
        ("--context-length=99", "rollout.context_tokens"),
        ("--nnodes=2", "one host"),
    ],
)
def test_a_teacher_is_where_and_what_the_recipe_says(argument: str, instead: str) -> None:
    with pytest.raises(RecipeError, match=rf"^distillation\.extra_args has --.*, which would replace .*{instead}"):
        check_extra_args(teaching(argument))
