"""Scores rows with the learner, plainly and with each rollout format emulated: MODEL ROWS.json SCORES.npz."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from megatron_bridge.learner import MegatronLearner
from megatron_bridge.step.fp8_emulation import emulated
from pipeline.config.recipe import LearnerSection
from precision.formats.quant_map import QuantMap
from precision.objectives.supervised import Supervised

if __name__ == "__main__":
    model, rows_file, scores_file = sys.argv[1:]
    rows = json.loads(Path(rows_file).read_text())
    learner = MegatronLearner.create(
        Path(model), LearnerSection(), Supervised(), temperature=1.0, seed=0, total_steps=1
    )
    scores = {"plain": np.stack(learner.score_tokens(rows))}
    for rollout_format in ("fp8_block", "fp8_tensor"):
        with emulated(learner, QuantMap.for_decoder(learner.shape.num_layers, rollout_format)):
            scores[rollout_format] = np.stack(learner.score_tokens(rows))
    np.savez(scores_file, **scores)
