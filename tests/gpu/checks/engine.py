"""One engine, in BF16 and in FP8 (128×128 blocks): tokens a second, then seconds to give it new weights on its GPU.

Decoding reads all weights once a step: 3.4 GB in BF16 take 1.15 ms at 3 TB/s, so that 64 samples cannot pass 56,000
tokens a second and 256 not 223,000, whatever else is done; in FP8 weights take about 0.6 of that (the LM head stays in
BF16). Without CUDA graphs, launching some 400 kernels a step from the host takes longer than that: one H200 gave 2,078
tokens a second at 64 and 7,285 at 256, with them 14,824 and 32,427.

The weights of 1.7 B numbers are 3.4 GB in BF16, 2.0 GB in FP8 (the embedding stays). Handed over on one device they are
read and written once on either side: 2 × 2.3 ms at 3 TB/s, and as much for gathering and quantizing. The rest of a
publish is asking: pausing, the engine's loading of each tensor, the probe. FP8 moves 0.6 of the bytes.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Any

from pipeline.data.membership import Member
from tests.gpu.check import Figures, Goal, Scale, ratios

NAME = "engine"
AFTER = ("stack.imports", "stack.engine")
PARTS = ("bf16", "fp8_block")
DEADLINE_S = 360.0
BATCHES = (64, 256)
GROUP = 8
ROUNDS = 3
"""Of publishing; the first is left out."""
ENGINE_ARGS = ("--mem-fraction-static=0.6", "--max-total-tokens=131072", f"--cuda-graph-max-bs-decode={max(BATCHES)}")
"""The engine is alone, with CUDA graphs for all its rows. 256 rows of 384 tokens under way need 98,304 places, each of
112 KiB in BF16."""


def _goals() -> tuple[Goal, ...]:
    goals = [Goal(figure="publish_fp8_over_bf16", what="publish, FP8 ÷ BF16", at_most=0.6)]
    for part in PARTS:
        for batch in BATCHES:
            floor = 30_000.0 if batch == max(BATCHES) else None
            what = f"{part}, {batch} samples under way"
            goals.append(Goal(figure=f"{part}_tokens_s_{batch}", what=what, unit="tokens/s", at_least=floor))
        goals += [
            Goal(figure=f"{part}_start_s", what=f"{part}, until it serves", unit="s"),
            Goal(figure=f"{part}_publish_s", what=f"{part}: publish", unit="s", at_most=0.25),
            Goal(figure=f"{part}_gb_s", what=f"{part}: bytes that the engine took ÷ those seconds", unit="GB/s"),
            Goal(figure=f"{part}_over_copy", what=f"{part}: publish ÷ a device copy of as many bytes"),
        ]
    goals += [Goal(figure=f"fp8_over_bf16_{batch}", what=f"FP8 ÷ BF16 at {batch}") for batch in BATCHES]
    return tuple(goals)


GOALS = _goals()


def run(scale: Scale) -> Figures:
    from launch.verify.parity import Engine, prepare
    from tests.gpu.engines import engine_recipe
    from tests.gpu.models import shared_model

    weights = dict(channel="ipc", keep=1, publish_deadline_s=120.0)
    recipe = engine_recipe(scale, shared_model(scale, "1.7b"), scale.part, "bf16", ENGINE_ARGS, weights=weights)
    run_directory = prepare(recipe)
    began = time.perf_counter()
    with Engine(run_directory, recipe) as engine:
        scale.keep(**{f"{scale.part}_start_s": time.perf_counter() - began})
        throughput(scale, recipe, engine)
        publishes(scale, recipe, run_directory, engine)
    return {}


def throughput(scale: Scale, recipe: Any, engine: Any) -> None:
    """Response tokens a second of all samples together."""
    from tests.gpu.engines import generate, prompts_of

    vocabulary = json.loads((recipe.model.path / "config.json").read_text())["vocab_size"]
    prompts = prompts_of(vocabulary, max(BATCHES) // GROUP, scale.of(128, 16))
    generate(engine, prompts, GROUP, scale.of(32, 4))  # kernels are compiled at first use
    for batch in BATCHES:
        few = prompts[: scale.of(batch, batch // 8) // GROUP]
        answers, seconds = generate(engine, few, GROUP, recipe.rollout.max_new_tokens)
        tokens = sum(len(one.tokens) for group in answers for one in group)
        scale.keep(**{f"{scale.part}_tokens_s_{batch}": tokens / seconds})


def publishes(scale: Scale, recipe: Any, run_directory: Any, engine: Any) -> None:
    """Some versions from a learner in this process."""
    from launch.build.learner import build_channel, build_learner
    from rollout_sglang.server.launch_server import API_KEY_VARIABLE
    from tests.support.learners import leave_world

    os.environ[API_KEY_VARIABLE] = engine.key
    run_directory.membership().announce(Member(0, engine.url))
    learner = build_learner(recipe)
    channel = build_channel(run_directory, recipe, learner)
    rounds = [one_publish(learner, channel, version) for version in range(1, ROUNDS + 1)][1:]
    channel.close()
    leave_world()
    found = {f"{scale.part}_{name}": value for name, value in summary(scale, rounds).items()}
    scale.keep(**found, **{f"{scale.part} publish, seconds": timers(rounds)})


def one_publish(learner: Any, channel: Any, version: int) -> dict[str, float]:
    """What the channel measured. Other weights each time, so that every version is another one."""
    import torch

    with torch.no_grad():
        for chunk in learner.model:
            for parameter in chunk.parameters():
                parameter.mul_(1 + 2**-6)
    measured: dict[str, float] = channel.publish(version)
    channel.wait_for_folder()
    if measured.get("engines_failed"):
        raise RuntimeError(f"the engine did not take version {version}: {measured}")
    print(version, {name: round(value, 4) for name, value in measured.items()}, flush=True)
    return measured


def summary(scale: Scale, rounds: list[dict[str, float]]) -> Figures:
    """Medians over rounds."""
    from tests.gpu.timing import copy_bandwidth

    median = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    size, publish_s = median["transfer_bytes"], median["publish_s"]
    copy_s = 2.0 * size / copy_bandwidth(scale.device, int(size))
    return {
        "publish_s": publish_s,
        "bytes": size,
        "gb_s": size / publish_s / 1e9,
        "transfer_gb_s": size / median["transfer_s"] / 1e9,
        "copy_s": copy_s,
        "over_copy": publish_s / copy_s,
    }


def timers(rounds: list[dict[str, float]]) -> list[object]:
    """Head, then [timer, median seconds, share of the publish]; write_s runs behind the publish before."""
    names = [name for name in rounds[0] if name.endswith("_s") and name != "publish_s"]
    whole = statistics.median(one["publish_s"] for one in rounds)
    rows: list[object] = [["timer", "s", "share"]]
    for name in names:
        median = statistics.median(one[name] for one in rounds)
        rows.append([name, round(median, 4), round(median / whole, 4)])
    return rows


def derive(figures: Figures) -> Figures:
    wanted = {f"fp8_over_bf16_{batch}": (f"fp8_block_tokens_s_{batch}", f"bf16_tokens_s_{batch}") for batch in BATCHES}
    return ratios(figures, wanted | {"publish_fp8_over_bf16": ("fp8_block_publish_s", "bf16_publish_s")})
