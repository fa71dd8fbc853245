"""Tokens a second of one engine, in BF16 and in FP8 (128×128 blocks), at 64 and at 256 samples under way.

Decoding reads all weights once a step: 3.4 GB in BF16 take 1.15 ms at 3 TB/s, so that 64 samples cannot pass 56,000
tokens a second and 256 not 223,000, whatever else is done; in FP8 weights take about 0.6 of that (the LM head stays in
BF16). Without CUDA graphs, launching some 400 kernels a step from the host takes longer than that: one H200 gave 2,078
tokens a second at 64 and 7,285 at 256, with them 14,824 and 32,427.
"""

from __future__ import annotations

import json

from tests.gpu.check import Figures, Goal, Scale, ratios

NAME = "engine"
AFTER: tuple[str, ...] = ()
PARTS = ("bf16", "fp8_block")
DEADLINE_S = 360.0
BATCHES = (64, 256)
GROUP = 8
ENGINE_ARGS = ("--mem-fraction-static=0.6", "--max-total-tokens=131072", f"--cuda-graph-max-bs-decode={max(BATCHES)}")
"""The engine is alone, with CUDA graphs for all its rows. 256 rows of 384 tokens under way need 98,304 places, each of
112 KiB in BF16."""


def _goals() -> tuple[Goal, ...]:
    goals = []
    for part in PARTS:
        goals += [
            Goal(figure=f"{part}_tokens_s_{batch}", what=f"{part}, {batch} samples under way", unit="tokens/s")
            for batch in BATCHES
        ]
        goals.append(Goal(figure=f"{part}_start_s", what=f"{part}, until it serves", unit="s"))
    goals += [Goal(figure=f"fp8_over_bf16_{batch}", what=f"FP8 ÷ BF16 at {batch}") for batch in BATCHES]
    return tuple(goals)


GOALS = _goals()


def run(scale: Scale) -> Figures:
    import time

    from launch.verify.parity import Engine, prepare
    from tests.gpu.engines import engine_recipe, generate, prompts_of
    from tests.gpu.models import shared_model

    model = shared_model(scale, "1.7b")
    recipe = engine_recipe(scale, model, scale.part, "bf16", ENGINE_ARGS)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    run_directory = prepare(recipe)
    began = time.perf_counter()
    with Engine(run_directory, recipe) as engine:
        scale.keep(**{f"{scale.part}_start_s": time.perf_counter() - began})
        new_tokens = recipe.rollout.max_new_tokens
        prompts = prompts_of(vocabulary, max(BATCHES) // GROUP, scale.of(128, 16))
        generate(engine, prompts, GROUP, scale.of(32, 4))  # kernels are compiled at first use
        for batch in BATCHES:
            answers, seconds = generate(engine, prompts[: scale.of(batch, batch // 8) // GROUP], GROUP, new_tokens)
            tokens = sum(len(one.tokens) for group in answers for one in group)
            scale.keep(**{f"{scale.part}_tokens_s_{batch}": tokens / seconds})
    return {}


def derive(figures: Figures) -> Figures:
    wanted = {f"fp8_over_bf16_{batch}": (f"fp8_block_tokens_s_{batch}", f"bf16_tokens_s_{batch}") for batch in BATCHES}
    return ratios(figures, wanted)
