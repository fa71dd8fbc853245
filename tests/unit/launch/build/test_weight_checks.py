"""How far an engine may be from the learner, by the precision of both."""

from __future__ import annotations

import pytest

from launch.build.learner import MAX_GAP_NATS, coarser_precision
from pipeline.config.loader import recipe_from


@pytest.mark.parametrize(
    ("rollout", "learner", "expected"),
    [
        ("fp32", dict(precision="fp32"), "fp32"),
        ("fp8_block", dict(precision="fp32"), "fp8_block"),
        ("bf16", dict(precision="fp8_delayed"), "fp8_tensor"),
        ("fp8_block", dict(precision="bf16", fp8_emulation=True), "bf16"),
        ("fp8_block", dict(precision="fp32", fp8_emulation=True), "bf16"),
        ("fp8_tensor", dict(precision="bf16", fp8_emulation=True), "fp8_tensor"),
        ("emulated_fp4", dict(precision="fp32"), "emulated_fp4"),
    ],
)
def test_emulated_block_fp8_is_held_to_the_bound_of_bf16(
    rollout: str, learner: dict[str, object], expected: str
) -> None:
    data = dict(
        run=dict(name="a", steps=1),
        model=dict(path="m"),
        task=dict(name="sort_digits"),
        rollout=dict(precision=rollout),
        learner=learner,
    )
    found = coarser_precision(recipe_from(data, source="t"))
    assert MAX_GAP_NATS[found] == MAX_GAP_NATS[expected]  # type: ignore[index]
