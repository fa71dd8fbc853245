"""A recipe reaches every setting of Megatron-Core's configuration classes that the program does not own."""

from __future__ import annotations

from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch

from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.model.build import transformer_config
from megatron_bridge.model.megatron_settings import OWNED, Part, check_owned, check_settings, megatron_config
from megatron_bridge.parallel.layout import Layout, check_layout
from pipeline.config.loader import load_recipe
from pipeline.config.recipe import LearnerSection, Recipe
from pipeline.errors import RecipeError
from pipeline.resume import change_of

HF: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 128, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "intermediate_size": 96, "norm_topk_prob": True,
    "tie_word_embeddings": False,
}  # fmt: skip
CHOSEN = frozenset(
    ("moe_token_dispatcher_type", "batch_p2p_sync", "attention_softmax_in_fp32", "masked_softmax_fusion")
) | {
    *("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "persist_layer_norm", "cuda_graph_scope"),
    *("gradient_accumulation_fusion", "barrier_with_L1_time", "moe_router_dtype", "recompute_modules"),
    *("recompute_num_layers", "moe_permute_fusion"),
}
"""Settings that the program chooses and a recipe may choose otherwise: they decide speed and rounding."""


def learner(part: str = "transformer", /, *, recompute: Any = "none", **settings: Any) -> LearnerSection:
    return LearnerSection(recompute=recompute, megatron={part: settings})


def config(recompute: Any = "none", **settings: Any) -> Any:
    shape = ModelConfig.from_hf(HF)
    return transformer_config(shape, Layout(), torch.bfloat16, recompute, settings=settings)


GPU_ALONE = [
    dict(cp_comm_type="a2a"),
    dict(cp_comm_type=["p2p", "a2a", "p2p", "a2a"]),
    dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep", moe_deepep_num_sms=24),
    dict(deterministic_mode=True),
    dict(cuda_graph_impl="transformer_engine", cuda_graph_scope=["attn"], cuda_graph_warmup_steps=2),
]


@pytest.mark.parametrize("settings", GPU_ALONE, ids=str)
def test_settings_for_gpus_reach_megatron_unchanged(settings: dict[str, Any]) -> None:
    check_owned(learner(**settings))
    check_settings(learner(**settings))
    found = config(**settings)
    for name, value in settings.items():
        is_scope = name == "cuda_graph_scope"  # Megatron makes its enumeration of the names
        assert [one.name for one in found.cuda_graph_scope] == value if is_scope else getattr(found, name) == value


def test_overlap_of_tensor_parallel_communication_reaches_megatron() -> None:
    shape, layout = ModelConfig.from_hf(HF), Layout(tensor=2, sequence=True)
    found = transformer_config(shape, layout, torch.bfloat16, settings=dict(tp_comm_overlap=True))
    assert found.tp_comm_overlap


def test_names_become_values(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer import optimizer_config
    from megatron.core.transformer.enums import AttnBackend

    monkeypatch.setattr(optimizer_config, "is_te_min_version", lambda _: True)  # Megatron asks without TE, too
    assert config(attention_backend="flash").attention_backend is AttnBackend.flash
    own = dict(optimizer="adam", bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True)
    given = dict(use_precision_aware_optimizer=True, optimizer_cpu_offload=True, exp_avg_dtype="bfloat16")
    found = megatron_config("optimizer", own, given)
    assert found.exp_avg_dtype is torch.bfloat16


def test_recomputed_modules_are_chosen() -> None:
    found = config("selective", recompute_modules=["core_attn", "layernorm"])
    assert (found.recompute_granularity, found.recompute_modules) == ("selective", ["core_attn", "layernorm"])
    assert config("selective").recompute_modules == ["moe"]


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        ("transformer", dict(hidden_size=8), "transformer.hidden_size would replace the model, .*; train another"),
        (
            "transformer",
            dict(tensor_model_parallel_size=2),
            "replace learner.tensor_parallel; leave it out, and change",
        ),
        ("transformer", dict(moe_aux_loss_coeff=0.1), "replace the policy that the reward alone moves; leave it out"),
        ("transformer", dict(fp8="e4m3"), "transformer.fp8 would replace learner.precision"),
        ("ddp", dict(overlap_grad_reduce=False), "ddp.overlap_grad_reduce would replace learner.overlap_grad_reduce"),
        ("optimizer", dict(lr=0.1), "optimizer.lr would replace learner.optimizer.lr; leave it out, and change that"),
        ("optimizer", dict(optimizer="muon"), "optimizer.optimizer would replace AdamW"),
        ("transformer", dict(recompute_modules=["mlp"]), "recompute_modules belongs to learner.recompute selective"),
        ("transformer", dict(moe_token_dispatcher_type="allgather"), "is allgather, .*; use alltoall or flex"),
    ],
)
def test_what_the_program_owns_is_refused_without_megatron(part: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as no:
        check_layout(HF, learner(part, **settings))
    assert "\n" not in str(no.value)


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        ("transformer", dict(recompute_module=["mlp"]), "TransformerConfig has none; did you mean recompute_modules"),
        ("transformer", dict(deterministic_mode="yes"), "deterministic_mode is 'yes', expected bool, as Megatron"),
        ("transformer", dict(deterministic_mode=1), "deterministic_mode is 1, expected bool"),
        ("transformer", dict(cuda_graph_impl="mine"), "is 'mine', expected Literal.*transformer_engine"),
        ("transformer", dict(attention_backend="fast"), r"expected AttnBackend \(flash, fused"),
        ("ddp", dict(bucket_size=2.5), "ddp.bucket_size is 2.5, expected Optional"),
        ("optimizer", dict(use_precision_aware_optimizer=True), "needs Transformer Engine's AdamW"),
        ("optimizer", dict(exp_avg_dtype="bf16"), "exp_avg_dtype is 'bf16', expected dtype"),
    ],
)
def test_names_and_types_are_those_of_megatrons_classes(part: str, settings: dict[str, Any], message: str) -> None:
    check_layout(HF, learner(part, **settings))  # what plans on a laptop cannot know
    with pytest.raises(RecipeError, match=message) as no:
        check_settings(learner(part, **settings))
    assert "\n" not in str(no.value)


def test_what_megatron_refuses_is_said_with_its_reason() -> None:
    with pytest.raises(RecipeError, match=r"transformer \(moe_enable_deepep\) is refused by .*flex token dispatcher"):
        config(moe_enable_deepep=True)


@pytest.mark.parametrize("part", OWNED)
def test_every_owned_name_is_megatrons(part: Part) -> None:
    known = {field.name for field in fields(type(megatron_config(part, dict(SMALLEST[part]), {})))}
    for names in OWNED[part].values():
        for pattern in names.split():
            assert any(fnmatchcase(name, pattern) for name in known), pattern


SMALLEST: dict[Part, dict[str, Any]] = {
    "transformer": dict(num_layers=1, hidden_size=8, num_attention_heads=1),
    "ddp": {},
    "optimizer": {},
}


def test_what_the_program_sets_is_owned_or_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_bridge.model import build

    passed = set[str]()
    monkeypatch.setattr(build, "megatron_config", lambda part, own, given: passed.update(own))
    config("selective")
    config("full")
    patterns = " ".join(OWNED["transformer"].values()).split()
    free = {name for name in passed if not any(fnmatchcase(name, pattern) for pattern in patterns)}
    assert free <= CHOSEN, free - CHOSEN


def test_settings_are_a_part_of_the_recipe_by_file_and_by_option(tmp_path: Any) -> None:
    recipe = load_recipe(
        dict(extends="demo", learner=dict(megatron=dict(ddp=dict(bucket_size=1000)))),
        ["learner.megatron.transformer.recompute_modules=[layernorm]", "learner.recompute=selective"],
    )
    assert recipe.learner.megatron.transformer == dict(recompute_modules=["layernorm"])
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


@pytest.mark.parametrize(
    ("key", "change"),
    [("transformer.deterministic_mode", "free"), ("ddp.bucket_size", "free"), ("optimizer.exp_avg_dtype", "never")],
)
def test_a_resumed_run_may_change_what_no_checkpoint_holds(key: str, change: str) -> None:
    recipe: Recipe = load_recipe(dict(extends="demo"))
    assert change_of(recipe, f"learner.megatron.{key}") == change
