"""One rank of `quant-map suggest`: score rows under many maps. Ranks have the same scores, so they decide alike."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from launch.build.components import quant_map_of
from launch.quant_map.scored_rows import ScoredRow, halves, token_rows
from launch.run.learn import build_learner
from launch.run.processes import run_child
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.step.sensitivity import row_scorer
from pipeline.child_process import die_with_parent
from pipeline.config.recipe import Recipe
from pipeline.data.files import write_atomically
from pipeline.data.run_directory import RunDirectory
from pipeline.trainer.checkpoints import Checkpoints
from precision.formats.quant_map import QuantMap
from precision.formats.quant_map_file import QuantMapFile
from precision.mismatch.sensitivity import layer_groups, promote_greedily, rank_groups
from precision.mismatch.statistics import Gap

FP8_BYTES = 1
"""Of a weight. Scales, a few per thousand, are left out."""


def measure(run: RunDirectory) -> dict[str, Any]:
    """Keys: ess_floor, reached, start and gap (a Gap), ranking and path (one entry a group, with its damage or cost),
    quant_map (as its file), version (of the run's checkpoint)."""
    recipe, job = run.recipe(), json.loads((run.path / "job.json").read_text())
    # Formats are emulated in Megatron's own layers, also where there are others.
    learner = build_learner(recipe, layers="megatron")
    version = 0
    if job["checkpoints"] is not None:
        version, _ = Checkpoints(Path(job["checkpoints"]), keep=1).restore(learner)
    rows = [ScoredRow(**row) for row in job["rows"]]
    quant = quant_map_of(recipe, QuantMapFile(base=recipe.rollout.precision))
    score, (chosen, held_out) = row_scorer(learner, token_rows(rows)), halves(rows)
    ranked = rank_groups(score, quant, chosen=chosen)
    costs = extra_bytes(recipe, learner, quant)
    found = promote_greedily(score, quant, ranked, ess_floor=job["ess_floor"], extra_bytes=costs, held_out=held_out)
    return dict(
        version=version,
        ess_floor=job["ess_floor"],
        reached=found.reached or not found.quant_map.formats,
        start=figures(found.start),
        gap=figures(found.gap),
        ranking=[
            dict(
                group=one.group.name,
                damage=one.damage,
                extra_bytes=costs[one.group.name],
                alone=figures(one.alone),
                promoted=None if one.promoted is None else figures(one.promoted),
            )
            for one in ranked
        ],
        path=[dict(group=step.group.name, extra_bytes=step.extra_bytes, **figures(step.gap)) for step in found.path],
        quant_map=found.quant_map.to_file().model_dump(mode="json"),
    )


def extra_bytes(recipe: Recipe, learner: MegatronLearner, quant: QuantMap) -> dict[str, int]:
    """Group → bytes that an engine holds more when the group is not quantized."""
    full = 4 if recipe.learner.precision == "fp32" else 2
    shapes = learner.model_config.tensors()
    return {
        group.name: (full - FP8_BYTES) * sum(math.prod(shapes[f"{module}.weight"]) for module in group.modules)
        for group in layer_groups(quant)
    }


def figures(gap: Gap) -> dict[str, float]:
    """As JSON."""
    return dict(num_tokens=gap.num_tokens, mean_abs=gap.mean_abs, max_abs=gap.max_abs, k3=gap.k3, ess=gap.ess)


def main(run: RunDirectory) -> None:
    result = measure(run)
    if torch.distributed.get_rank() == 0:
        write_atomically(run.path / "result.json", json.dumps(result))
    torch.distributed.barrier()


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "ranking", lambda: main(directory))
