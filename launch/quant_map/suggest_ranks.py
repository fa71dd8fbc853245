"""One rank of `quant-map suggest`: score rows under many maps. Ranks have the same scores, so they decide alike."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from launch.build.components import quant_map_of
from launch.quant_map.judgment import judged
from launch.quant_map.scored_rows import RecordedRows, ScoredRow, token_rows
from launch.run.learn import build_learner
from launch.run.processes import run_child
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.step.sensitivity import row_scorer
from pipeline.child_process import die_with_parent
from pipeline.config.recipe import Recipe
from pipeline.data.files import write_atomically
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.trainer.checkpoints import Checkpoints
from precision.formats.quant_map import QuantMap
from precision.formats.quant_map_file import QuantMapFile
from precision.mismatch.sensitivity import layer_groups

FP8_BYTES = 1
"""Of a weight. Scales, a few per thousand, are left out."""


def measure(run: RunDirectory) -> dict[str, Any]:
    """The keys of `judged`, and version (of the run's checkpoint)."""
    recipe, job = run.recipe(), json.loads((run.path / "job.json").read_text(encoding="utf-8"))
    # Formats are emulated in Megatron's own layers, also where there are others.
    learner = build_learner(recipe, layers="megatron")
    version, rows = 0, [ScoredRow(**row) for row in job["rows"]]
    scored = token_rows(rows)
    if job["run"] is not None:
        source = RunDirectory(Path(job["run"]))
        version, _ = Checkpoints(source.checkpoints, keep=1).restore(learner)
        if "batch" in job:
            recorded = RecordedRows(batch=job["batch"], samples=job["samples"], rows=rows)
            scored = recorded.token_rows(BatchStore(source.batches))
    quant = quant_map_of(recipe, QuantMapFile(base=recipe.rollout.precision))
    score, costs = row_scorer(learner, scored), extra_bytes(recipe, learner, quant)
    return dict(version=version, **judged(score, quant, rows, costs=costs, ess_floor=job["ess_floor"]))


def extra_bytes(recipe: Recipe, learner: MegatronLearner, quant: QuantMap) -> dict[str, int]:
    """Group → bytes that an engine holds more when the group is not quantized."""
    full = 4 if recipe.learner.precision == "fp32" else 2
    shapes = learner.model_config.tensors()
    return {
        group.name: (full - FP8_BYTES) * sum(math.prod(shapes[f"{module}.weight"]) for module in group.modules)
        for group in layer_groups(quant)
    }


def main(run: RunDirectory) -> None:
    result = measure(run)
    if torch.distributed.get_rank() == 0:
        write_atomically(run.path / "result.json", json.dumps(result))
    torch.distributed.barrier()


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "ranking", lambda: main(directory))
