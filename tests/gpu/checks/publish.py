"""Seconds to give an engine on the same GPU new weights, in BF16 and in FP8, beside a plain copy of as many bytes.

The weights of 1.7 B numbers are 3.4 GB in BF16, 2.0 GB in FP8 (the embedding stays). Handed over on one device they are
read and written once on either side: 2 × 2.3 ms at 3 TB/s, and as much for gathering and quantizing. The rest of a
publish is asking: pausing, the engine's loading of each tensor, the probe. FP8 moves 0.6 of the bytes.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

from pipeline.data.membership import Member
from tests.gpu.check import Figures, Goal, Scale, ratios

NAME = "publish"
AFTER = ("stack.imports", "engine")
PARTS = ("bf16", "fp8_block")
DEADLINE_S = 300.0
ROUNDS = 5
"""The first is left out."""


def _goals() -> tuple[Goal, ...]:
    goals = [Goal(figure="fp8_over_bf16", what="seconds in FP8 ÷ in BF16", at_most=0.6)]
    for part in PARTS:
        goals += [
            Goal(figure=f"{part}_publish_s", what=f"{part}: publish", unit="s"),
            Goal(figure=f"{part}_gb_s", what=f"{part}: bytes that the engine took ÷ those seconds", unit="GB/s"),
            Goal(
                figure=f"{part}_wire_gb_s", what=f"{part}: bytes ÷ seconds on the wire, loading included", unit="GB/s"
            ),
            Goal(figure=f"{part}_over_copy", what=f"{part}: publish ÷ a device copy of as many bytes"),
        ]
    return tuple(goals)


GOALS = _goals()


def run(scale: Scale) -> Figures:
    from launch.build.learner import build_channel, build_learner
    from launch.verify.parity import Engine, prepare
    from rollout_sglang.server.launch_server import API_KEY_VARIABLE
    from tests.gpu.engines import engine_recipe
    from tests.gpu.models import shared_model
    from tests.support.learners import leave_world

    model = shared_model(scale, "1.7b")
    recipe = engine_recipe(
        scale, model, scale.part, "bf16", weights=dict(channel="ipc", keep=1, publish_deadline_s=120.0)
    )
    run_directory = prepare(recipe)
    with Engine(run_directory, recipe) as engine:
        os.environ[API_KEY_VARIABLE] = engine.key
        run_directory.membership().announce(Member(0, engine.url))
        learner = build_learner(recipe)
        channel = build_channel(run_directory, recipe, learner)
        rounds = [one_publish(learner, channel, version) for version in range(1, ROUNDS + 1)]
        channel.close()
        leave_world()
    return {f"{scale.part}_{name}": value for name, value in summary(scale, rounds[1:]).items()} | {
        f"{scale.part} seconds": timers(rounds[1:])
    }


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
    return ratios(figures, {"fp8_over_bf16": ("fp8_block_publish_s", "bf16_publish_s")})
