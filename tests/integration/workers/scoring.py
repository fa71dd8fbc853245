"""What a learner of one rank thinks of rows of tokens, plainly and with rollouts' formats emulated, and of batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import leave_layout
from megatron_bridge.step.fp8_emulation import emulated
from pipeline.config.recipe import LearnerSection
from pipeline.config.sections import RolloutPrecision
from pipeline.data.batch import Batch
from precision.formats.quant_map import QuantMap
from precision.supervised import Supervised

Scores = list[NDArray[np.float32]]
"""A row of n tokens has n - 1 log-probabilities."""
FlatScores = NDArray[np.float32]


def score(
    model: Path, rows: Sequence[Sequence[int]], temperature: float, formats: Sequence[RolloutPrecision] = ()
) -> dict[str, Scores]:
    """`plain` and each of `formats` → the scores of all rows."""
    learner = MegatronLearner.create(
        model,
        LearnerSection(precision="fp32", step_deadline_s=240),
        Supervised(),
        temperature=temperature,
        seed=0,
        total_steps=1,
    )
    found = {"plain": list(learner.score_tokens(rows))}
    for name in formats:
        with emulated(learner, QuantMap.for_decoder(learner.model_config.num_layers, name)):
            found[name] = list(learner.score_tokens(rows))
    return found


def score_batches(models: Sequence[Path], batches: Sequence[Batch], temperature: float) -> list[list[FlatScores]]:
    """For each model, [responses] of each batch: renormalized where it has kept sets."""
    return [_score_batches(model, batches, temperature) for model in models]


def _score_batches(model: Path, batches: Sequence[Batch], temperature: float) -> list[FlatScores]:
    learner = MegatronLearner.create(
        model,
        LearnerSection(precision="fp32", step_deadline_s=240),
        Supervised(),
        temperature=temperature,
        seed=0,
        total_steps=1,
    )
    found = [learner.logprobs(batch) for batch in batches]
    leave_layout()
    return found
