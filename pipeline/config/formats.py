"""Which formats of numbers learner and rollouts may have together."""

from __future__ import annotations


def check_emulation(fp8_emulation: bool, learner: str, rollout: str) -> None:
    """Raises ValueError where `learner.fp8_emulation` has no FP8 to emulate, or learner.precision is FP8 already."""
    if not fp8_emulation:
        return
    if not rollout.startswith("fp8"):
        raise ValueError(
            f"learner.fp8_emulation emulates the FP8 of the rollouts, but rollout.precision is {rollout}; set "
            "rollout.precision to fp8_block or fp8_tensor, or learner.fp8_emulation=false"
        )
    if learner.startswith("fp8"):
        raise ValueError(
            f"learner.fp8_emulation is true, but learner.precision is {learner}, which multiplies in FP8 already; set "
            "learner.precision to bf16 or fp32 (emulated, any machine), or learner.fp8_emulation=false (on a GPU)"
        )
