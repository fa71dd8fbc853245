"""Training under emulated FP8 in every layout of two ranks, and in one; see test_emulated_training.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from launch.verify.layout_ranks import TEMPERATURE, train, weights
from launch.verify.layouts import section
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import Layout, initialize, leave_layout
from precision.formats.quant_map import QuantMap
from precision.objectives.p3o import P3O

EXPERTS, NUM_LAYERS = 4, 4


def measure(models: Path, out: Path, cases: Sequence[tuple[str, str, str]]) -> None:
    """One rank: for each (model, layout, format or "plain") the change of every weight by one step."""
    for model, layout, rollout_format in cases:
        emulate = rollout_format != "plain"
        learner_section = section(layout).model_copy(update=dict(fp8_emulation=emulate))
        initialize(Layout.of(learner_section), seed=0, deadline_s=240)
        experts = EXPERTS if model == "experts" else None
        learner = MegatronLearner(
            models / model,
            learner_section,
            P3O(),
            temperature=TEMPERATURE,
            total_steps=1,
            emulate=QuantMap.for_decoder(NUM_LAYERS, rollout_format, experts) if emulate else None,
        )
        before = weights(learner)
        train(learner, 0)
        change = weights(learner) - before
        if dist.get_rank() == 0:
            np.savez(out / f"{model} {layout} {rollout_format}.npz", change=change)
        leave_layout()
