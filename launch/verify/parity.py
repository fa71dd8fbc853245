"""Run `evenkeel verify parity`: compare the log-probabilities of learner and engine.

    fp32 rollouts   engine samples ──rows──▶ learner (each layout) scores the same rows          prompt, sampled
                    learner trains one step, publishes by disk ──▶ engine scores the rows again  published
    FP8 rollouts    the same, with the learner scoring plainly and with the rollout's formats emulated

The gap is |log π_learner − log π_engine| per token, in nats. Each layout runs in a separate torchrun, as in training.
The engine runs by EVENKEEL_ROLLOUT_PYTHON, if set. Only CPUs can pass: GPU kernels compute in 16 bits.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.convert.new_model import new_model
from launch.run.one_engine import OneEngine
from launch.run.preflight import seed_policy
from launch.run.processes import child_environment, run_ranks, torchrun
from launch.terminal import counted
from pipeline.config.loader import recipe_from
from pipeline.config.recipe import Recipe, parse_layout
from pipeline.data.batch import Completion, Sampling
from pipeline.data.membership import Member
from pipeline.data.run_directory import RunDirectory
from rollout_sglang.server.launch_server import API_KEY_VARIABLE
from rollout_sglang.server.rollout_python import require_sglang

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS, SAMPLES = 16, 24, 24, 2
CONTEXT_TOKENS = 512
FP8_FORMATS = ("fp8_tensor", "fp8_block")


@dataclass
class Rows:
    """Token rows and the engine's log-probabilities of them."""

    tokens: list[list[int]]
    prompt: list[NDArray[np.float64]]
    """Prefill logprobs of prompt tokens 1 … p-1."""
    sampled: list[NDArray[np.float64]]
    """Decode logprobs of the response tokens."""

    def gaps(self, learner: Sequence[NDArray[Any]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return |learner − engine| on prompt tokens and on sampled tokens; `learner` rows hold tokens 1 … n-1."""
        splits = [(row[: len(p)], row[len(p) :]) for row, p in zip(learner, self.prompt, strict=True)]
        prompt = [np.abs(ours - theirs) for (ours, _), theirs in zip(splits, self.prompt, strict=True)]
        sampled = [np.abs(ours - theirs) for (_, ours), theirs in zip(splits, self.sampled, strict=True)]
        return np.concatenate(prompt), np.concatenate(sampled)


def parity(model: Path | None, layouts: Sequence[str], tolerance: float) -> dict[str, Any]:
    """Run the comparisons. Returns max_abs_logprob_gap, tolerance, layouts, fp8, ok. Raises EngineStartError."""
    require_sglang()
    parsed = {name: parse_layout(name) for name in layouts}
    total = len(parsed) + len(FP8_FORMATS)
    with tempfile.TemporaryDirectory(prefix="evenkeel-parity-") as scratch, counted("parity", total) as show:
        folder = Path(scratch)
        if model is None:
            model = folder / "model"
            new_model(model)
        fp32 = compare_fp32(folder, model, parsed, show)
        fp8 = {}
        for done, name in enumerate(FP8_FORMATS, start=len(parsed) + 1):
            fp8[name] = compare_fp8(folder, model, name)
            show(done)
    worst = max(gap for row in fp32.values() for gap in row.values())
    closed = min(row["closed_share"] for row in fp8.values())
    return dict(
        max_abs_logprob_gap=worst,
        tolerance=tolerance,
        layouts=fp32,
        fp8=fp8,
        ok=bool(worst <= tolerance and closed >= 0.9),
    )


def compare_fp32(
    folder: Path, model: Path, layouts: dict[str, dict[str, int]], show: Callable[[int], None]
) -> dict[str, dict[str, float]]:
    """Return layout → largest gap on prompts, on sampled tokens and after a publish."""
    recipe = parity_recipe(folder, "fp32", model, "fp32", {})
    run = prepare(recipe)
    results = {}
    with Engine(run, recipe) as engine:
        rows = asyncio.run(engine.sample())
        for version, (name, sizes) in enumerate(layouts.items(), start=1):
            learner = parity_recipe(folder, f"fp32-{name}", model, "fp32", sizes)
            scores = score_in_ranks(engine, prepare(learner), learner, rows.tokens, publish=version)
            prompt, sampled = rows.gaps(scores["before"])
            again = asyncio.run(engine.prefill(rows.tokens))
            published = [np.abs(o - t).max() for o, t in zip(scores["after"], again, strict=True)]
            results[name] = dict(
                prompt=float(prompt.max()), sampled=float(sampled.max()), published=float(max(published))
            )
            show(version)
    return results


def compare_fp8(folder: Path, model: Path, precision: str) -> dict[str, float]:
    """Return the mean gaps of the plain and of the emulating learner: to the engine's prefill of all tokens, before and
    after a publish, and to its decoding of the sampled tokens.

    `closed_share` is the share of the gap to a prefill that emulation closes, the smaller of the two. Decoding sums in
    another order: its difference to prefill (`mean_gap_decode_prefill`) is rounding that no emulation can close.
    """
    recipe = parity_recipe(folder, precision, model, precision, {})
    run = prepare(recipe)
    with Engine(run, recipe) as engine:
        rows = asyncio.run(engine.sample())
        prefill = asyncio.run(engine.prefill(rows.tokens))
        scores = score_in_ranks(engine, run, recipe, rows.tokens, publish=1)
        again = asyncio.run(engine.prefill(rows.tokens))
    compared = (("before", prefill), ("before_emulated", prefill), ("after", again), ("after_emulated", again))
    plain, emulated, after, after_emulated = (
        float(np.concatenate([np.abs(o - t) for o, t in zip(scores[key], theirs, strict=True)]).mean())
        for key, theirs in compared
    )
    return dict(
        mean_gap=plain,
        mean_gap_emulated=emulated,
        mean_gap_published=after,
        mean_gap_published_emulated=after_emulated,
        mean_gap_decoded=float(rows.gaps(scores["before"])[1].mean()),
        mean_gap_decoded_emulated=float(rows.gaps(scores["before_emulated"])[1].mean()),
        mean_gap_decode_prefill=float(rows.gaps(prefill)[1].mean()),
        closed_share=min(1 - emulated / plain, 1 - after_emulated / after),
    )


def parity_recipe(folder: Path, name: str, model: Path, precision: str, sizes: dict[str, int]) -> Recipe:
    data = dict(
        run=dict(name=name, root=str(folder), steps=1),
        model=dict(path=str(model)),
        task=dict(name="sort_digits"),
        rollout=dict(
            precision=precision,
            prompts_per_batch=NUM_PROMPTS,
            group_size=SAMPLES,
            max_new_tokens=NEW_TOKENS,
            context_tokens=CONTEXT_TOKENS,
        ),
        learner=dict(precision="fp32") | sizes,
    )
    return recipe_from(data, source="verify parity")


def prepare(recipe: Recipe) -> RunDirectory:
    """Begin the run of a recipe, with the model as version 0."""
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    seed_policy(run, recipe)
    return run


class Engine(OneEngine):
    """An engine that serves version 0 of a run and samples rows to compare."""

    async def sample(self) -> Rows:
        vocabulary = json.loads((self.recipe.model.path / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        generator = random.Random(0)
        prompts = [[generator.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
        client = self.client()
        try:
            answers = [await client.generate(p, SAMPLES, Sampling(max_new_tokens=NEW_TOKENS)) for p in prompts]
        finally:
            await client.close()
        return await self.rows(prompts, answers)

    async def rows(self, prompts: Sequence[list[int]], answers: Sequence[Sequence[Completion]]) -> Rows:
        """Return completions with the engine's logprobs: by prefill on their prompts, by decoding on responses."""
        pairs = [(p, a) for p, group in zip(prompts, answers, strict=True) for a in group]
        return Rows(
            tokens=[[*p, *a.tokens.tolist()] for p, a in pairs],
            prompt=await self.prefill([p for p, _ in pairs]),
            sampled=[a.logprobs.astype(np.float64) for _, a in pairs],
        )


def score_in_ranks(
    engine: Engine, run: RunDirectory, recipe: Recipe, rows: list[list[int]], publish: int
) -> dict[str, list[NDArray[np.float32]]]:
    """Return rows' scores by a learner, `before` and `after` it trains a step and publishes it."""
    run.membership().announce(Member(0, engine.url))
    (run.path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    command = torchrun(recipe.learner.num_processes, "launch.verify.parity_ranks", str(run.path), str(publish))
    env = {**child_environment(), API_KEY_VARIABLE: engine.key}
    run_ranks(run, command, log=run.logs / "parity.log", env=env, deadline_s=recipe.learner.step_deadline_s)
    with np.load(run.path / "scores.npz", allow_pickle=False) as stored:
        names = sorted({key.rpartition(".")[0] for key in stored.files})
        return {name: [stored[f"{name}.{i}"] for i in range(len(rows))] for name in names}
