"""The memory model against Megatron-LM's published figures, against real models, and against itself."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.plan.footprint import (
    GIB,
    Workload,
    chunks_in_flight,
    footprints,
    held_parameters,
    layer_activations,
    worst_footprint,
)
from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.parallel.layout import Layout
from pipeline.config.recipe import LearnerSection
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[4]
MODELS = ROOT / "pipeline" / "recipes" / "models"


def config(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MODELS / name / "config.json").read_text())
    return loaded


QWEN3_32B = ModelConfig.from_hf(config("qwen3-32b"))
QWEN3_30B_A3B = ModelConfig.from_hf(config("qwen3-30b-a3b"))
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 160,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
TINY_EXPERTS = TINY | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def work(tokens: int = 4096, count: int = 64, **others: Any) -> Workload:
    return Workload(tokens=tokens, count=count, **others)


def learner(tensor: int = 1, pipeline: int = 1, data: int = 1, **others: Any) -> LearnerSection:
    fields = dict(tensor_parallel=tensor, pipeline_parallel=pipeline, data_parallel=data, precision="bf16")
    return LearnerSection(**(fields | dict(sequence_parallel=tensor > 1) | others))


@pytest.mark.parametrize(
    ("sizes", "static", "activations"),
    [((8, 1, 1), 68.7, 7.6), ((4, 4, 2), 24.0, 15.2), ((8, 2, 2), 22.9, 7.6), ((8, 1, 4), 34.3, 7.6)],
)
def test_qwen3_32b(sizes: tuple[int, int, int], static: float, activations: float) -> None:
    """Bytes a parameter as in Megatron-LM's theoretical memory usage, worked out by hand: 4096 tokens a micro-batch."""
    found = worst_footprint(QWEN3_32B, learner(*sizes), work())
    assert found.static / GIB == pytest.approx(static, rel=0.005)
    assert found.activations / GIB == pytest.approx(activations, rel=0.01)
    assert found.stage == 0


def test_bytes_of_activations_by_hand() -> None:
    """8h + 6·(query and key/value widths) + 6·ffn: Qwen3-32B keeps 249,856 bytes a token and layer."""
    assert layer_activations(QWEN3_32B, learner(), work()) == 8 * 5120 + 6 * 128 * 72 + 6 * 25600 == 249_856
    without_split_norms = layer_activations(QWEN3_32B, learner(4, sequence_parallel=False), work())
    assert without_split_norms == 8 * 5120 + (6 * 128 * 72 + 6 * 25600) / 4
    assert layer_activations(QWEN3_32B, learner(recompute="full"), work()) == 2 * 5120


def test_megatron_settings_that_save_memory_are_counted() -> None:
    """Moments in BF16: 8 bytes a number in place of 12; half of it on the host: 4. The MLP stays where it is not
    among the recomputed modules."""
    plain = worst_footprint(QWEN3_32B, learner(8), work())
    moments = dict(use_precision_aware_optimizer=True, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")
    offloaded = moments | dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    for settings, share in ((moments, 8 / 12), (offloaded, 4 / 12)):
        found = worst_footprint(QWEN3_32B, learner(8, megatron=dict(optimizer=settings)), work())
        assert found.optimizer == pytest.approx(plain.optimizer * share)
    modules = dict(transformer=dict(recompute_modules=["core_attn"]))
    assert layer_activations(QWEN3_32B, learner(8, recompute="selective", megatron=modules), work()) == (
        layer_activations(QWEN3_32B, learner(8), work())
    )


def test_float32_has_no_main_copies() -> None:
    found = worst_footprint(QWEN3_32B, learner(8, precision="fp32"), work())
    assert found.static == 16 * found.held.total


def test_experts_are_spread_and_so_is_their_optimizer() -> None:
    """28.99 B of 30.53 B numbers are in experts: a rank of EP8 holds an eighth; 16 ranks hold each twice."""
    in_experts = 48 * 128 * 3 * 2048 * 768
    section = learner(2, 1, 8, expert_parallel=8)
    held = held_parameters(QWEN3_30B_A3B, section, 0)
    assert held.expert == in_experts // 8
    found = worst_footprint(QWEN3_30B_A3B, section, work())
    assert found.optimizer == pytest.approx(12 * held.dense / 8 + 12 * held.expert / 2)
    wider = learner(2, 1, 16, expert_parallel=8)
    assert worst_footprint(QWEN3_30B_A3B, wider, work()).optimizer == pytest.approx(
        12 * held.dense / 16 + 12 * held.expert / 4
    )


def test_stages_of_different_sizes_hold_what_is_theirs() -> None:
    """94 layers and, counted as a layer each, embedding and head: 24 to each of four stages."""
    shape = ModelConfig.from_hf(config("qwen3-32b") | dict(num_hidden_layers=94))
    counted = dict(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    section = learner(8, 4, megatron=dict(transformer=counted))
    stages = footprints(shape, section, work())
    assert [stage.held.matrices // (stages[1].held.matrices // 24) for stage in stages] == [23, 24, 24, 23]


def test_pipeline_stages_hold_what_is_in_flight() -> None:
    plain = Layout(pipeline=4)
    assert [chunks_in_flight(plain, stage, 64) for stage in range(4)] == [4, 3, 2, 1]
    assert [chunks_in_flight(plain, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert chunks_in_flight(Layout(), 0, 64) == 1


@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (4, 2), (4, 4), (8, 3)])
def test_interleaving_costs_what_megatron_says(stages: int, virtual: int) -> None:
    """Megatron-LM scales the activations of all layers by 1 + (PP - 1) / (PP · VPP) on the first stage."""
    chunks = chunks_in_flight(Layout(pipeline=stages, virtual=virtual), 0, 64)
    assert chunks / (stages * virtual) == pytest.approx(1 + (stages - 1) / (stages * virtual))


def test_the_last_stage_holds_the_head() -> None:
    stages = footprints(QWEN3_32B, learner(4, 4, 2), work())
    assert [stage.head > 0 for stage in stages] == [False, False, False, True]
    logits = 4096 * 151_936 // 4 * 2
    assert logits < stages[-1].head < 4 * logits
    precise = footprints(QWEN3_32B, learner(4, 4, 2), work(fp32_lm_head=True))[-1]
    # Logits twice as wide; parts of 256 MiB and their product with the hidden states; in float32 two products of a
    # token, their sum, and the sum over columns, where the head in bfloat16 has one result of two bytes.
    parts = (256 << 20) + 4 * ((256 << 20) // (4 * 4096)) * 5120
    assert precise.head - stages[-1].head == logits + parts + 4096 * 5120 * (4 * 4 - 2)


def test_total_is_the_sum_of_its_items() -> None:
    for found in footprints(QWEN3_32B, learner(4, 4, 2), work(bucket_bytes=1 << 29)):
        assert sum(found.items().values()) == found.total


def test_publishing_holds_the_largest_tensor_once_if_it_is_the_vocabulary() -> None:
    embedding = 2 * 151_936 * 5120
    for bucket, expected in ((0, embedding), (1 << 29, 3 * embedding), (1 << 31, embedding + (2 << 31))):
        found = worst_footprint(QWEN3_32B, learner(4, 4, 2), work(bucket_bytes=bucket))
        assert found.publishing == expected


def test_short_micro_batches_leave_the_most_memory_to_a_publish() -> None:
    for found in footprints(QWEN3_32B, learner(4, 4, 2), work(tokens=64, bucket_bytes=1 << 31)):
        assert found.publishing > max(found.training, found.scoring)
        assert found.total - found.static - found.allowance == found.publishing
        assert found.items()["publishing"] == found.publishing


def test_buckets_that_are_there_while_a_step_trains_are_added_to_it() -> None:
    plain, beside = (
        worst_footprint(QWEN3_32B, learner(4, 4, 2), work(bucket_bytes=1 << 31, buckets_stay=stay))
        for stay in (False, True)
    )
    assert plain.training > plain.publishing  # else nothing would be shown
    assert beside.total - beside.allowance == plain.total - plain.allowance + (2 << 31)
    assert sum(beside.items().values()) == beside.total
    assert beside.buckets + beside.publishing == plain.publishing


def test_the_probe_rounds_a_copy_of_the_matrices() -> None:
    plain, emulated = (
        worst_footprint(QWEN3_32B, learner(4, 4, 2), work(kernels="local", emulates_at_publish=emulates))
        for emulates in (False, True)
    )
    assert emulated.publishing - plain.publishing == 2 * plain.held.matrices


layouts = st.builds(
    learner,
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 4, 8]),
    data=st.sampled_from([1, 2, 4]),
    context_parallel=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    distributed_optimizer=st.booleans(),
)


@given(layouts, st.sampled_from(["fused", "local"]))
def test_more_ranks_never_need_more_static_memory(section: LearnerSection, kernels: Any) -> None:
    one = worst_footprint(QWEN3_32B, section, work(kernels=kernels))
    for key in ("tensor_parallel", "data_parallel"):
        wider = section.model_copy(update={key: 2 * getattr(section, key), "sequence_parallel": True})
        if wider.tensor_parallel <= 8:
            assert worst_footprint(QWEN3_32B, wider, work(kernels=kernels)).static <= one.static


@given(layouts)
def test_stages_together_hold_the_model(section: LearnerSection) -> None:
    """Split matrices add up to the whole; what every tensor parallel rank holds (norms) is all there is beside them."""
    layout = Layout.of(section)
    held = sum(held_parameters(QWEN3_32B, section, stage).total for stage in range(layout.pipeline)) * layout.tensor
    norms = (64 * (2 * 5120 + 2 * 128) + 5120) * (layout.tensor - 1)
    assert held == QWEN3_32B.num_parameters + norms


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (config("qwen3-32b"), dict(pipeline=2)),
    (TINY, dict(tensor=2, pipeline=2)),
    (TINY, dict(pipeline=2, virtual=2)),
    (TINY | dict(num_hidden_layers=5), dict(pipeline=2, settings=dict(num_layers_in_first_pipeline_stage=2))),
    (
        TINY | dict(num_hidden_layers=7),
        dict(pipeline=2, virtual=2, settings=dict(account_for_embedding_in_pipeline_split=True)),
    ),
    (TINY | {"architectures": ["Qwen2ForCausalLM"]}, dict(tensor=2)),
    (TINY_EXPERTS, dict(tensor=2, pipeline=2, expert=2, sequence=True)),
]


def test_counts_are_those_of_real_models_on_the_meta_device() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core warns about packages that a CPU does not have
        from tests.support.parameters import build

    (built,) = run_ranks(1, build, CASES)
    for (hf_config, sizes), ranks in zip(CASES, built, strict=True):
        shape = ModelConfig.from_hf(hf_config)
        section = LearnerSection(
            tensor_parallel=sizes.get("tensor", 1),
            pipeline_parallel=sizes.get("pipeline", 1),
            virtual_pipeline=sizes.get("virtual", 1),
            expert_parallel=sizes.get("expert", 1),
            sequence_parallel=sizes.get("sequence", False),
            megatron=dict(transformer=sizes.get("settings", {})),
        )
        assert len(ranks) == section.num_processes
        for rank in ranks:
            numbers = 0
            for size in rank.sizes.values():
                product = 1
                for length in size:
                    product *= length
                numbers += product
            assert held_parameters(shape, section, rank.stage).total == numbers, (sizes, rank.stage)


def test_fp8_training_keeps_two_copies_of_matrices_and_inputs_in_one_byte() -> None:
    """Qwen3-32B by hand: a layer's matrices are 5120 × (8192 + 2 × 1024) + 8192 × 5120 + 3 × 5120 × 25600."""
    matrices = 64 * (5120 * 10240 + 8192 * 5120 + 3 * 5120 * 25600)
    assert held_parameters(QWEN3_32B, LearnerSection(tensor_parallel=8), 0).matrices == matrices // 8
    work = Workload(tokens=4096, count=4)
    both: dict[str, Any] = dict(tensor_parallel=8, sequence_parallel=True, data_parallel=4)
    (plain,) = footprints(QWEN3_32B, LearnerSection(precision="bf16", **both), work)
    (quantized,) = footprints(QWEN3_32B, LearnerSection(precision="fp8_block", **both), work)
    assert plain.quantized == 0
    assert "quantized" not in plain.items()
    assert quantized.static - plain.static == quantized.quantized == quantized.items()["quantized"] == matrices // 4
    # Two norms' outputs (5120 each) and the product (25600) lose a byte a position and layer, over 8 ranks.
    assert plain.activations - quantized.activations == 4096 * 64 * (2 * 5120 + 25600) // 8
    for name in ("parameters", "gradients", "optimizer", "head"):
        assert getattr(plain, name) == getattr(quantized, name)


def test_emulated_fp8_keeps_a_rounded_copy_of_matrices() -> None:
    work = Workload(tokens=4096, count=4, kernels="local")
    for precision, width in (("bf16", 2), ("fp32", 4)):
        plain, emulated = (
            footprints(QWEN3_32B, LearnerSection(precision=precision, fp8_emulation=on), work)[0]
            for on in (False, True)
        )
        assert emulated.static - plain.static == width * plain.held.matrices
        assert emulated.activations == plain.activations


def test_repeated_keys_are_as_many_as_queries() -> None:
    """Qwen3-32B: 8 heads of keys and 8 of values, of 128 channels, become 64 each."""
    once, repeated = (
        layer_activations(QWEN3_32B, LearnerSection(precision="fp32"), work(kernels="local", repeated_keys=on))
        for on in (False, True)
    )
    assert repeated - once == 4 * 2 * (64 - 8) * 128


def test_fp8_training_sends_experts_one_byte() -> None:
    work = Workload(tokens=1024, count=1)
    plain, quantized = (
        layer_activations(QWEN3_30B_A3B, LearnerSection(precision=precision), work)
        for precision in ("bf16", "fp8_tensor")
    )
    # Two norms; for each of 8 experts the hidden states sent to it and its product.
    assert plain - quantized == 2 * 2048 + 8 * (2048 + 768)
