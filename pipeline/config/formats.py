"""Which formats of numbers learner and rollouts may have together."""

from __future__ import annotations

from pipeline.errors import RecipeError
from precision.formats.rollout_format import RolloutFormat


def check_emulation(fp8_emulation: bool, learner: str, rollout: str, quantized: RolloutFormat | None) -> None:
    """Raises ValueError where `learner.fp8_emulation` has no format to emulate, or learner.precision is FP8 already.

    `learner` and `rollout`: the two precisions. `quantized`: the rollout's format, if it is quantized.
    """
    if not fp8_emulation:
        return
    if quantized is None:
        raise ValueError(
            f"learner.fp8_emulation emulates the quantization of the rollouts, but rollout.precision is {rollout}; set "
            "rollout.precision to fp8_block or another quantized format, or learner.fp8_emulation=false"
        )
    if learner.startswith("fp8"):
        raise ValueError(
            f"learner.fp8_emulation is true, but learner.precision is {learner}, which multiplies in FP8 already; set "
            "learner.precision to bf16 or fp32 (emulated, any machine), or learner.fp8_emulation=false (on a GPU)"
        )


def check_gpu_serves(rollout_format: RolloutFormat | None) -> None:
    """Raises RecipeError for a format that engines on GPUs do not have, or cannot be given new weights in; None is not
    quantized."""
    if rollout_format is RolloutFormat.FP8_TENSOR:
        # Fp8LinearMethod puts bare parameters, transposed and without weight_loader, in place of those that it loaded.
        raise RecipeError(
            "rollout.precision is fp8_tensor, which SGLang makes itself as it loads: on a GPU it cannot load the next "
            "version over that, and the engine dies; set fp8_block, which the learner makes, or bf16"
        )
    if rollout_format is not None and rollout_format.is_emulated:
        raise RecipeError(
            f"rollout.precision is {rollout_format}, which engines on CPUs emulate and no GPU of ours serves; set "
            "fp8_block or bf16, or run on a machine without a GPU"
        )


def check_mixture(rollout_format: RolloutFormat | None, *, experts: bool) -> None:
    """Raises RecipeError for a format that has no mixture of experts."""
    if experts and rollout_format is not None and rollout_format.is_emulated:
        raise RecipeError(
            f"rollout.precision is {rollout_format}, which is emulated in dense models only, but the model has "
            "experts; set bf16 or fp32, or take a dense model"
        )
