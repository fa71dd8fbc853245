"""A step of training under emulated FP8 changes the weights alike in every parallel layout, up to rounding luck."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from launch.verify.layout_ranks import TEMPERATURE, train, weights
from launch.verify.layouts import section, write_model
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import Layout, initialize, leave_layout
from precision.formats.quant_map import QuantMap
from precision.objectives.p3o import P3O
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LAYOUTS = {
    "dense": ("TP2×SP×RECOMPUTE", "PP2×VPP2", "CP2", "DP2", "DP2×PLAIN"),
    "experts": ("EP2", "PP2", "TP2×SP×ETP2", "CP2×EP2"),
}
FORMATS = ("fp8_tensor", "fp8_block")


def measure(folder: Path, cases: Sequence[tuple[str, str, str]]) -> None:
    """One rank: for each (model, layout, format or "plain") the change of every weight by one step."""
    for model, layout, rollout_format in cases:
        emulate = rollout_format != "plain"
        learner_section = section(layout).model_copy(update=dict(fp8_emulation=emulate))
        initialize(Layout.of(learner_section), seed=0, deadline_s=240)
        learner = MegatronLearner(
            folder / model,
            learner_section,
            P3O(),
            temperature=TEMPERATURE,
            total_steps=1,
            emulate=QuantMap.for_decoder(4, rollout_format, 4 if model == "experts" else None) if emulate else None,
        )
        before = weights(learner)
        train(learner, 0)
        change = weights(learner) - before
        if dist.get_rank() == 0:
            np.savez(folder / f"{model} {layout} {rollout_format}.npz", change=change)
        leave_layout()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("emulated")
    for model in LAYOUTS:
        write_model(folder / model, experts=model == "experts")
    run_ranks(1, measure, folder, [(model, "one×MB2", name) for model in LAYOUTS for name in (*FORMATS, "plain")])
    parallel = [(model, layout, name) for model, layouts in LAYOUTS.items() for layout in layouts for name in FORMATS]
    run_ranks(2, measure, folder, parallel)
    return folder


@pytest.mark.parametrize("rollout_format", FORMATS)
@pytest.mark.parametrize(
    ("model", "layout"), [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts]
)
def test_layouts_agree(found: Path, model: str, layout: str, rollout_format: str) -> None:
    ours, single, plain = (
        np.load(found / f"{model} {name}.npz")["change"]
        for name in (f"{layout} {rollout_format}", f"one×MB2 {rollout_format}", "one×MB2 plain")
    )
    effect, difference = np.linalg.norm(plain - single), np.linalg.norm(ours - single)
    # Tensor parallel ranks sum in another order, by which an activation here and there is rounded to the other side.
    assert difference < (0.1 if "TP2" in layout else 1e-3) * effect
