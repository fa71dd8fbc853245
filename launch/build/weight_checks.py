"""How the versions of a run are verified: the probe's tokens, how close an engine must come, and its checksums."""

from __future__ import annotations

from collections.abc import Callable

from launch.build.components import build_tokenizer
from launch.build.engines import engine_dtype
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from megatron_bridge.weight_sync.disk import WeightCheckPlan
from pipeline.config.recipe import Recipe
from pipeline.config.rollout_section import RolloutPrecision
from pipeline.ports.weight_check import NUM_ROWS, NUM_ROWS_ON_CPU, ROW_TOKENS, probe_rows
from rollout_sglang.server.start import has_cuda
from rollout_sglang.weights.expected_checksums import ExpectedChecksums

MAX_GAP_NATS: dict[RolloutPrecision, float] = {
    "fp32": 0.01,
    "bf16": 0.15,
    "fp8_tensor": 0.4,
    "fp8_block": 0.4,
    "emulated_fp6": 0.8,
    "emulated_fp4": 2.0,
    "emulated_nvfp4": 2.0,
    "emulated_mxfp4": 2.0,
}
"""Default of weights.probe_max_gap_nats, on random tokens. Where the learner emulates the formats for the probe, right
weights are nowhere near it: at most .011 nats over 120 versions of each of eight runs, in FP4 and block FP8.

Where it does not (Transformer Engine's layers), the formats themselves count. BF16 costs at most .023: its bound has
room. FP8 cost at most .14 in six tiny models when this was set, but up to .33 in trained ones since, FP4 up to 1.08. An
engine that is refused with right weights wants a higher bound in its recipe.

Faults in FP8 for comparison. All scales 1.25 times too large: 0.47 to 0.65 in trained models, 0.08 to 0.19 in random
ones. One scale: 0.2 to 0.33 and 0.02 to 0.12, medians. The digests find smaller faults. Where they are not known, lower
the bound to 1.5 times the probe_kernels_nats in the run's metrics, or the probe_gap_nats where it has none."""


def build_weight_check_plan(recipe: Recipe) -> WeightCheckPlan:
    """The same for every version of the run."""
    tokenizer = build_tokenizer(recipe)
    allowed = recipe.weights.probe_max_gap_nats
    return WeightCheckPlan(
        rows=probe_rows(
            tokenizer.vocab_size,
            {tokenizer.eos_token_id, tokenizer.pad_token_id},
            recipe.run.seed,
            num_rows=max(NUM_ROWS if has_cuda() else NUM_ROWS_ON_CPU, recipe.learner.data_parallel),
            row_tokens=min(ROW_TOKENS, recipe.rollout.context_tokens - 1),
        ),
        max_mean_gap_nats=MAX_GAP_NATS[coarser_precision(recipe)] if allowed is None else allowed,
        new_checksums=checksums_maker(recipe),
        dtype=engine_dtype(recipe),
    )


def coarser_precision(recipe: Recipe) -> RolloutPrecision:
    """The coarser of the learner's and the engine's precision: it decides how far the two may differ.

    A learner that emulates the engines' block FP8 is as far from them as in BF16: at most 0.052 nats in the mean over
    48 versions of two runs in BF16, where one that does not was up to 0.105 away. Not so with fp8_tensor: its scales
    depend on the engine's tensor parallel size and kernels.
    """
    if recipe.learner.fp8_emulation and recipe.rollout.precision == "fp8_block":
        return "bf16"
    learner: RolloutPrecision = "fp8_tensor" if recipe.learner.precision == "fp8_delayed" else recipe.learner.precision
    return max(recipe.rollout.precision, learner, key=lambda precision: MAX_GAP_NATS[precision])


def checksums_maker(recipe: Recipe) -> Callable[[], ExpectedChecksums] | None:
    """New digests for one version; None for engines on GPUs, which hash by another function."""
    if has_cuda():
        return None
    shape = ModelConfig.from_hf(read_hf_config(recipe.model.path))
    import torch

    def new() -> ExpectedChecksums:
        return ExpectedChecksums(
            dtype=getattr(torch, engine_dtype(recipe)),
            num_kv_heads=shape.num_kv_heads,
            num_experts=0 if shape.experts is None else shape.experts.count,
            tied_embeddings=shape.tied_embeddings,
            tensor_parallel=recipe.rollout.tensor_parallel,
        )

    return new


def checksums_of(recipe: Recipe) -> ExpectedChecksums | None:
    """Digests of one version, to be observed as it is written."""
    maker = checksums_maker(recipe)
    return None if maker is None else maker()
