"""What a learner of one rank thinks of rows of tokens, plainly and with the formats of rollouts emulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_bridge.learner import MegatronLearner
from megatron_bridge.step.fp8_emulation import emulated
from pipeline.config.recipe import LearnerSection, RolloutPrecision
from precision.formats.quant_map import QuantMap
from precision.supervised import Supervised

Scores = list[NDArray[np.float32]]
"""A row of n tokens has n - 1 log-probabilities."""


def score(
    model: Path, rows: Sequence[Sequence[int]], temperature: float, formats: Sequence[RolloutPrecision] = ()
) -> dict[str, Scores]:
    """`plain` and each of `formats` → the scores of all rows."""
    learner = MegatronLearner.create(
        model, LearnerSection(step_deadline_s=60), Supervised(), temperature=temperature, seed=0, total_steps=1
    )
    found = {"plain": list(learner.score_tokens(rows))}
    for name in formats:
        with emulated(learner, QuantMap.for_decoder(learner.model_config.num_layers, name)):
            found[name] = list(learner.score_tokens(rows))
    return found
