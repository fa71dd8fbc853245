"""Define what each `learner.precision` requires of Transformer Engine (TE), of the model and of packed rows.

In FP8, parameters are BF16 with float32 main copies in the optimizer, and the decoder layers' matrix products are FP8:
all three of a linear (forward, gradient of the input, gradient of the weight). Embedding, norms, rotations, attention,
router and LM head stay in BF16.

    fp8_tensor    a scale for each tensor, from the tensor itself; gradients in e5m2    TE's Float8CurrentScaling
    fp8_block     128×128 weights, 1×128 activations and gradients, all in e4m3         TE's Float8BlockScaling
    fp8_delayed   a scale for each tensor, from the largest magnitude of earlier        TE's DelayedScaling
                  micro-batches; gradients in e5m2

A cast to FP8 saturates: an infinity becomes a finite number, and only NaN is kept. The checks of the loss and the
gradient norm still see the residual stream, which is never cast. Saturated values are not counted. Under fp8_tensor and
fp8_block no finite value saturates, because scales come from the tensor itself. Under fp8_delayed, counting would read
every activation once more.

One H200 has run all of them (ops/measurements). This module loads neither torch nor Megatron.
"""

from __future__ import annotations

from typing import Any, Literal

from pipeline.config.recipe import LearnerPrecision

Layers = Literal["transformer_engine", "megatron"]

GEMM_MULTIPLE = 16
"""Multiple of each side of an FP8 matrix product: cuBLAS needs rows of 16 bytes (docs.nvidia.com/cuda/cublas, "Tensor
Core Usage"), and each side is the row of one of the three products. Megatron's get_fp8_align_size agrees."""
BLOCK_MULTIPLE = 128
"""Tokens that share a scale in a weight's gradient under fp8_block. Under sequence parallelism TE 2.11 gathers
activations in FP8 and asserts whole blocks on every rank."""

_RECIPES: dict[LearnerPrecision, dict[str, Any]] = {
    "fp8_tensor": {"fp8_recipe": "tensorwise", "fp8": "hybrid"},
    "fp8_block": {"fp8_recipe": "blockwise", "fp8": "e4m3"},
    # TE's own defaults. Megatron-Core's use the last micro-batch alone, which saturates growing tensors.
    "fp8_delayed": {
        "fp8_recipe": "delayed",
        "fp8": "hybrid",
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
    },
}


def is_fp8(precision: LearnerPrecision | None) -> bool:
    return precision in _RECIPES


def fp8_arguments(precision: LearnerPrecision | None) -> dict[str, Any]:
    """Return the FP8 arguments of Megatron's TransformerConfig; {} without FP8."""
    return dict(_RECIPES[precision]) if precision in _RECIPES else {}


def token_multiple(precision: LearnerPrecision) -> int:
    """Return the number that must divide each rank's tokens of a micro-batch between layers; 1 without FP8."""
    if precision == "fp8_block":
        return BLOCK_MULTIPLE
    return GEMM_MULTIPLE if is_fp8(precision) else 1


def warm_up_passes(precision: LearnerPrecision) -> int:
    """Return the number of forward-backward passes to run before the first pass whose results count. Scales of
    fp8_delayed start at 1, which rounds most gradients of a large batch to zero. A pass can set a tensor's scale only
    if the tensor arrives unrounded: the first pass sets the scales of the residual stream, the second those behind one
    product (the MLP's inner gradient), the third those behind attention."""
    return 3 if precision == "fp8_delayed" else 0
