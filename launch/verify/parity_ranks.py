"""Run one rank of `verify parity`: score rows, train a step, publish it, score again; with FP8 also by emulation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launch.build.components import build_contract, build_quant_map, build_tokenizer
from launch.build.learner import build_channel, build_learner
from launch.run.processes import run_child
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.step.fp8_emulation import emulated
from pipeline.child_process import die_with_parent
from pipeline.config.recipe import Recipe
from pipeline.data.batch import Response, given_batch
from pipeline.data.run_directory import RunDirectory


def score(run: RunDirectory, version: int) -> None:
    """Write scores.npz: NAME.i is row i's logprobs of tokens 1 … n-1, float32."""
    recipe = run.recipe()
    rows: list[list[int]] = json.loads((run.path / "rows.json").read_text(encoding="utf-8"))
    quant = build_quant_map(recipe)
    # Formats are emulated only in Megatron's layers.
    learner = build_learner(recipe, layers=None if quant is None else "megatron")
    scores: dict[str, list[NDArray[np.float32]]] = {}

    def score_as(moment: str) -> None:
        scores[moment] = learner.score_tokens(rows)
        if quant is not None:
            with emulated(learner, quant):
                scores[f"{moment}_emulated"] = learner.score_tokens(rows)

    score_as("before")
    train_one_step(recipe, learner, rows)
    build_channel(run, recipe, learner).publish(version)
    score_as("after")
    if learner.is_rank_zero:
        arrays: dict[str, NDArray[np.float32]] = {
            f"{name}.{i}": row for name, values in scores.items() for i, row in enumerate(values)
        }
        with (run.path / "scores.npz").open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    learner.barrier()


def train_one_step(recipe: Recipe, learner: MegatronLearner, rows: list[list[int]]) -> None:
    """Move the weights by one real optimizer step, so that a publish that changes nothing cannot pass."""
    groups = []
    for index, row in enumerate(rows):
        half = len(row) // 2
        groups.append((row[:half], [Response(row[half:], (-1.0,) * (len(row) - half), reward=float(index % 2))]))
    batch = given_batch(0, groups, build_contract(recipe, build_tokenizer(recipe)))
    advantages = np.where(batch.reward > 0, 1.0, -1.0).astype(np.float32)
    scored = learner.logprobs(batch)
    learner.update(batch, advantages, scored)


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "parity", lambda: score(directory, int(sys.argv[2])))
