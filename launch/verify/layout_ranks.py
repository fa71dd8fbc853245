"""Run one rank of `verify layouts`: three steps in every layout of one size, one layout after another."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from launch.run.processes import run_child
from launch.verify.layouts import MAX_ROW
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import Layout, check_layout, initialize, leave_layout
from pipeline.child_process import die_with_parent
from pipeline.config.recipe import LearnerSection
from pipeline.data.batch import Batch, LogprobContract, Response, given_batch
from pipeline.data.routed_experts import RoutedExperts
from pipeline.data.run_directory import RunDirectory
from precision.objectives.p3o import P3O

STEPS, NUM_PROMPTS, SAMPLES = 3, 4, 4
TEMPERATURE = 0.9
CONTRACT = LogprobContract(temperature=TEMPERATURE, top_p=1.0, top_k=-1, tokenizer_sha256="")


def measure(folder: Path) -> None:
    """Write NAME.npz for each case of cases.json: logprobs [responses] before the first step; loss, grad_norm, ess
    [steps taken]; weight_change [parameters]."""
    for case in json.loads((folder / "cases.json").read_text(encoding="utf-8")):
        section = LearnerSection(**case["learner"])
        check_layout(read_hf_config(folder / case["model"]), section)
        initialize(Layout.of(section), seed=0, deadline_s=section.step_deadline_s)
        learner = MegatronLearner(folder / case["model"], section, P3O(), temperature=TEMPERATURE, total_steps=STEPS)
        replayed = case["model"] == "replay"
        found = three_steps(learner, folder / f"{case['model']}.checkpoint", case["checkpoint"], replayed=replayed)
        if learner.is_rank_zero:
            with (folder / f"{case['name']}.npz.tmp").open("wb") as file:
                np.savez(file, **found)  # type: ignore[arg-type]
            (folder / f"{case['name']}.npz.tmp").rename(folder / f"{case['name']}.npz")
        leave_layout()


def three_steps(
    learner: MegatronLearner, checkpoint: Path, use: str, *, replayed: bool = False
) -> dict[str, NDArray[np.float64]]:
    """Train on three batches of uneven rows. The checkpoint is saved after two, or loaded in their place, as `use`
    says. `replayed` gives random experts for three quarters of the tokens."""

    def batch_of(step: int) -> Batch:
        batch = make_batch(step, learner.model_config.vocab_size)
        experts = random_experts(batch, learner.model_config, seed=step, unknown=0.25) if replayed else None
        return replace(batch, experts=experts)

    before, logprobs = weights(learner), learner.logprobs(batch_of(0))
    rows: list[dict[str, Any]] = []
    for step in range(STEPS):
        if step == STEPS - 1 and use == "saved":
            learner.save(checkpoint)
        if step == STEPS - 1 and use == "loaded":
            learner.load(checkpoint)
        if use != "loaded" or step == STEPS - 1:
            rows.append(train(learner, step, batch_of(step)))
    curves = {name: np.array([row[name] for row in rows], np.float64) for name in ("loss", "grad_norm", "ess")}
    return curves | {"logprobs": logprobs.astype(np.float64), "weight_change": weights(learner) - before}


def train(learner: MegatronLearner, step: int, batch: Batch | None = None) -> dict[str, float]:
    """Take an optimizer step on `batch`, by default the batch that `make_batch` makes for the step."""
    batch = batch or make_batch(step, learner.model_config.vocab_size)
    scored = learner.logprobs(batch)
    return learner.update(batch, (batch.reward - batch.reward.mean()).astype(np.float32), scored).metrics


def weights(learner: MegatronLearner) -> NDArray[np.float64]:
    """Return all HF tensors as one vector, in the order of their names: float64 [parameters]."""
    named = {name: tensor.to("cpu", torch.float64, copy=True).flatten() for name, tensor in learner.named_weights()}
    vector: NDArray[np.float64] = torch.cat([named[name] for name in sorted(named)]).numpy()
    return vector


def make_batch(seed: int, vocabulary: int) -> Batch:
    """Make rows of 0.7 to 1 times the longest, so that a micro-batch for n longest rows holds exactly n rows."""
    random = np.random.default_rng(seed)
    groups = []
    for _ in range(NUM_PROMPTS):
        prompt = random.integers(0, vocabulary, random.integers(3, 12)).tolist()
        lengths = [int(random.integers(7 * MAX_ROW // 10, MAX_ROW)) + 1 - len(prompt) for _ in range(SAMPLES)]
        lengths[0] = MAX_ROW + 1 - len(prompt)
        responses = []
        for length in lengths:
            tokens = random.integers(0, vocabulary, length).tolist()
            logprobs = random.normal(-np.log(vocabulary), 0.3, length).tolist()
            responses.append(Response(tokens, logprobs, reward=float(random.normal())))
        groups.append((prompt, responses))
    return given_batch(seed, groups, CONTRACT)


def random_experts(batch: Batch, model: ModelConfig, *, seed: int, unknown: float) -> RoutedExperts:
    """Return random experts for every token; the share `unknown` of the tokens is marked as unknown."""
    assert model.experts is not None
    random = np.random.default_rng(seed)
    drawn = random.random((len(batch.tokens), model.num_layers, model.experts.count))
    known = random.random(len(batch.tokens)) >= unknown
    ids = np.argsort(drawn, axis=-1)[..., : model.experts.per_token].astype(np.uint8)
    return RoutedExperts(ids=np.where(known[:, None, None], ids, np.uint8(0)), known=known)


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "layouts", lambda: measure(directory.path))
