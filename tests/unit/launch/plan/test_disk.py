"""What `evenkeel plan` says of a run's disk, against files that the product wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.plan.costs import Assumptions
from launch.plan.disk import disk_use
from launch.plan.planner import make_plan
from megatron_bridge.hf.model_config import ModelConfig
from pipeline.config.loader import load_recipe
from pipeline.data.batch import Batch, Completion, Group, Prompt, Sample
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from tests.support.batches import CONTRACT, episode

RECIPES = Path(__file__).parents[4] / "pipeline" / "recipes"
DENSE = RECIPES / "qwen3_32b.yaml"
PROMPTS, GROUP, PROMPT, RESPONSE = 32, 8, 64, 512


def plan(*overrides: str, recipe: Path = DENSE) -> dict[str, Any]:
    found = make_plan(recipe, list(overrides), dict(mean_response_tokens=3000.0), gpus=64, gpu_gib=80.0)["disk"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("turns", [1, 4])
def test_files_are_as_large_as_the_plan_says(tmp_path: Path, turns: int) -> None:
    """Of a batch with ids as frequent as words (Zipf), and of its log-probabilities; an episode of four turns reads as
    much between two turns as it says in each."""
    random = np.random.default_rng(0)
    config = ModelConfig.from_hf(json.loads((RECIPES / "models" / "qwen3-32b" / "config.json").read_text()))
    often = np.arange(1, config.vocab_size + 1) ** -1.0
    names = random.permutation(config.vocab_size)

    def ids(count: int) -> list[int]:
        found: list[int] = names[random.choice(config.vocab_size, count, p=often / often.sum())].tolist()
        return found

    def answer(prompt: Prompt) -> Sample:
        size = RESPONSE // turns
        logprobs = np.log(random.beta(5.0, 0.3, (turns, size))).tolist()
        parts = np.array(ids((2 * turns - 1) * size)).reshape(-1, size).tolist()
        if turns == 1:
            return Sample(completion=Completion.given(parts[0], logprobs[0]), reward=1.0)
        return episode(parts[::2], parts[1::2], prompt=prompt.tokens, logprobs=logprobs, reward=1.0)

    groups = []
    for group in range(PROMPTS):
        prompt = Prompt(group=group, text="", answer="", tokens=tuple(ids(PROMPT)), problem=group)
        groups.append(Group(prompt=prompt, samples=tuple(answer(prompt) for _ in range(GROUP))))
    batch = Batch.from_groups(0, groups, contract=CONTRACT, dropped=(), next_group=PROMPTS, recipe_sha256="r")
    run = RunDirectory(tmp_path)
    run.make_folders()
    size = BatchStore(run.batches).commit(batch).stat().st_size
    run.write_logprobs(0, np.zeros(batch.num_response_tokens, np.float32))
    recipe = load_recipe(DENSE, [f"rollout.prompts_per_batch={PROMPTS}", f"rollout.group_size={GROUP}"])
    read = RESPONSE - RESPONSE // turns
    assumed = Assumptions(mean_response_tokens=RESPONSE, mean_prompt_tokens=PROMPT, mean_observed_tokens=read)
    said = disk_use(config, recipe, assumed, 0.0)
    assert said["batch_gigabytes"] == pytest.approx(size / 1e9, rel=0.1)
    assert said["logprobs_gigabytes"] == pytest.approx((run.logprobs / "000000.npy").stat().st_size / 1e9, rel=0.01)


def test_a_run_that_keeps_all_grows_with_its_steps(tmp_path: Path) -> None:
    short, long = plan("run.steps=100"), plan("run.steps=1100")
    assert short["terabytes"] == short["all_terabytes"]
    grown = 1000 * (short["batch_gigabytes"] + short["logprobs_gigabytes"]) / 1000
    assert long["terabytes"] - short["terabytes"] == pytest.approx(grown)


@pytest.mark.parametrize(
    ("keys", "batches", "logprobs"),
    [
        (["run.keep_batches=100"], 122, 122),
        (["run.keep_batches=1"], 42, 42),
        (["run.keep_logprobs=100"], 10_000, 122),
        (["run.keep_batches=200", "run.keep_logprobs=100"], 222, 122),
        (["run.keep_batches=100", "run.steps=50"], 50, 50),
    ],
)
def test_retention_is_counted(keys: list[str], batches: int, logprobs: int) -> None:
    """Beside those kept there are those since the newest checkpoint, with lag 1 two batches under way; and none leaves
    that the older of two checkpoints may train again."""
    every = ["run.steps=10000", "checkpoint.every=20", "checkpoint.keep=2", "schedule.kind=async", "schedule.lag=1"]
    found = plan(*every, *keys)
    assert (found["batches_kept"], found["logprobs_kept"]) == (batches, logprobs)
    left = batches * found["batch_gigabytes"] + logprobs * found["logprobs_gigabytes"]
    assert found["terabytes"] - found["fixed_terabytes"] == pytest.approx(left / 1000, rel=0.05)


def test_the_experts_of_a_mixture_are_most_of_its_batches() -> None:
    columns = plan(recipe=RECIPES / "qwen3_30b_a3b.yaml")["columns"]
    assert columns["experts"] > 10 * columns["tokens"]
