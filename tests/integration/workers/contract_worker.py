"""The learner's log-probabilities of given rows: `contract_worker.py MODEL ROWS.json OUT.npz TEMPERATURE`."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

warnings.filterwarnings("ignore")


def main(model: str, rows: str, out: str, temperature: str) -> None:
    from megatron_bridge.learner import MegatronLearner
    from pipeline.config.recipe import LearnerSection
    from precision.objectives import Supervised

    learner = MegatronLearner.create(
        Path(model),
        LearnerSection(step_deadline_s=60),
        Supervised(),
        temperature=float(temperature),
        seed=0,
        total_steps=1,
    )
    scored = learner.score_tokens(json.loads(Path(rows).read_text()))
    np.savez(out, *scored)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
