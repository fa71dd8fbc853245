"""Seconds of a publish by each weight channel, beside a plain copy of as many bytes over loopback in the same run.

A random Qwen3 of 50 million parameters; learner (one process) and engine in bf16, once with bf16 and once with
128×128-block FP8 rollouts. Disk, broadcast, ipc and copy take turns; every version has other weights and is verified by
the engine's checksums and the probe. The first round is left out. Numbers are medians of the other rounds.

    publish_s      the whole publish: probe scored, weights out, loaded by the engine, verified, published
    transfer_s         broadcast, ipc: in which the engine receives and loads
    wire           broadcast: of transfer_s, the process group alone: wire_s without asking the engine (ask_s: as
                       many buckets of next to nothing)
    loading        broadcast: of transfer_s, what is not wire; ipc: all of it
    settle_s       broadcast, ipc: after publish_s, until the policy folder behind it is complete
    bytes          of the weights in the policy folder, as they travel
    outside        broadcast, ipc: what is left of publish_s without transfer_s
    paused_share   of a publish beside training: what of it the engines stood still
    held_share     the same of the learner

On a CPU an engine emulates FP8: after each load it makes bf16 weights from the e4m3 ones (load_s), and verifying and
digests work on those. Learner, engine and writer share the cores. Compare ratios within one run only.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from launch.convert.new_model import new_model
from launch.run.processes import run_ranks, torchrun
from launch.verify.parity import Engine, prepare
from pipeline.data.membership import Member
from rollout_sglang.server.launch_server import API_KEY_VARIABLE
from tests.bench.figures import medians, tell
from tests.bench.publish_ranks import CHANNELS
from tests.support.runs import a_recipe, environment

PRECISIONS = ("bf16", "fp8_block")
ROUNDS = 6
DEADLINE_S = 110.0
"""Of one publish."""
RUN_DEADLINE_S = 900.0
"""Of all rounds: a machine whose cores compute bf16 slowly takes three minutes for them."""
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 1024, 4, 8, 4, 128, 3072


def measure(folder: Path, model: Path, precision: str) -> dict[str, dict[str, Any]]:
    """Channel → its numbers, with one engine and one learner for all."""
    recipe = a_recipe(
        folder,
        run=dict(name=precision, steps=1),
        model=dict(path=str(model)),
        rollout=dict(precision=precision, context_tokens=128, max_new_tokens=24),
        learner=dict(precision="bf16", step_deadline_s=DEADLINE_S),
        weights=dict(publish_deadline_s=DEADLINE_S),
    )
    run = prepare(recipe)
    with Engine(run, recipe) as engine:
        run.membership().announce(Member(0, engine.url))
        command = torchrun(recipe.learner.num_processes, "tests.bench.publish_ranks", str(run.path), str(ROUNDS))
        env = {**environment(), API_KEY_VARIABLE: engine.key}
        run_ranks(run, command, log=run.logs / "bench.log", env=env, deadline_s=RUN_DEADLINE_S)
    found = json.loads((run.path / "bench.json").read_text())
    copy_s = medians(found["loopback"][1:])["copy_s"]
    return {channel: case(medians(found[channel][1:]), copy_s) for channel in CHANNELS}


def case(measured: dict[str, float], copy_s: float) -> dict[str, Any]:
    """One channel at one precision."""
    size, publish_s = measured["bytes"], measured["publish_s"]
    timers = {name: seconds for name, seconds in measured.items() if name.endswith("_s") and name != "publish_s"}
    result: dict[str, Any] = dict(
        bytes=size,
        publish_s=publish_s,
        gb_per_s=size / publish_s / 1e9,
        loopback_s=copy_s,
        loopback_gb_per_s=size / copy_s / 1e9,
        publish_over_loopback=publish_s / copy_s,
        timers=timers,
    )
    if "transfer_s" in timers:
        wire_s = timers["wire_s"] - timers.get("ask_s", 0.0)
        result["transfer_over_loopback"] = timers["transfer_s"] / copy_s
        result["wire_over_loopback"] = wire_s / copy_s
        result["loading_over_loopback"] = (timers["transfer_s"] - wire_s) / copy_s
        result["outside_over_loopback"] = (publish_s - timers["transfer_s"]) / copy_s
    beside_s = timers["beside_publish_s"]
    result |= dict(paused_share=timers["beside_paused_s"] / beside_s, held_share=timers["beside_held_s"] / beside_s)
    return result


def main() -> None:
    results: dict[str, Any] = dict(load_before=os.getloadavg()[0], cores=os.cpu_count())
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as scratch:
        folder = Path(scratch)
        new_model(
            folder / "model",
            hidden=HIDDEN,
            layers=LAYERS,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            ffn=FFN,
            dtype="bfloat16",
        )
        for precision in PRECISIONS:
            results[precision] = measure(folder, folder / "model", precision)
    disk = {precision: results[precision]["disk"]["bytes"] for precision in PRECISIONS}
    results["fp8_bytes_over_bf16"] = disk["fp8_block"] / disk["bf16"]
    tell(results)


if __name__ == "__main__":
    main()
