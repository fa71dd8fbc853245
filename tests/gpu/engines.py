"""Real engines under the recipe of the checks: started, asked, fed. Needs what the collector needs, and no torch."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.verify.parity import Engine, Rows
from pipeline.config.loader import load_recipe, recipe_from
from pipeline.config.recipe import Recipe
from pipeline.data.batch import Completion, Sampling
from tests.gpu.check import Scale
from tests.support.runs import ROOT

ONE_GPU = ROOT / "pipeline" / "recipes" / "one_gpu.yaml"
"""Its engine arguments are those of the checks too."""


def engine_recipe(
    scale: Scale,
    model: Path,
    rollout: str,
    learner: str,
    engine_args: Sequence[str] = (),
    **sections: dict[str, Any],
) -> Recipe:
    """A run of the part's name that serves `model` in precision `rollout`; `sections` are added to.

    On a GPU the engine gets the shipped recipe's arguments and then `engine_args`: SGLang takes the last of a name."""
    data: dict[str, dict[str, Any]] = dict(
        run=dict(name=scale.part, root=str(scale.runs), steps=1),
        model=dict(path=str(model)),
        task=dict(name="sort_digits"),
        rollout=dict(
            precision=rollout,
            prompts_per_batch=2,
            group_size=2,
            max_new_tokens=scale.of(256, 24),
            context_tokens=scale.of(1024, 128),
            start_deadline_s=scale.of(240.0, 120.0),
            extra_args=[] if scale.rehearsal else [*load_recipe(ONE_GPU).rollout.extra_args, *engine_args],
        ),
        learner=dict(precision=learner, micro_batch_tokens=scale.of(8192, 1024), optimizer=dict(lr=1e-5)),
    )
    for name, section in sections.items():
        data[name] = data.get(name, {}) | section
    return recipe_from(data, source="tests.gpu")


def prompts_of(vocabulary: int, count: int, length: int) -> list[list[int]]:
    """Random token ids."""
    draw = random.Random(0)
    return [[draw.randrange(2, vocabulary) for _ in range(length)] for _ in range(count)]


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], num_samples: int, new_tokens: int
) -> tuple[list[list[Completion]], float]:
    """All prompts at once: (completions by prompt, seconds)."""

    async def ask() -> list[list[Completion]]:
        client = engine.client()
        sampling = Sampling(max_new_tokens=new_tokens)
        try:
            return await asyncio.gather(*(client.generate(prompt, num_samples, sampling) for prompt in prompts))
        finally:
            await client.close()

    began = time.perf_counter()
    answers = asyncio.run(ask())
    return answers, time.perf_counter() - began


def sampled_rows(engine: Engine, prompts: Sequence[list[int]], num_samples: int, new_tokens: int) -> Rows:
    """See Engine.rows."""
    answers, _ = generate(engine, prompts, num_samples, new_tokens)
    return asyncio.run(engine.rows(prompts, answers))
