"""The whole loop on one GPU, learner and engine sharing it: 20 steps of the shipped recipe, seconds of each phase.

The recipe is pipeline/recipes/one_gpu.yaml (rehearsal: a tiny one that publishes over the same channel), run by the
command line as a user would: a random model, a short supervised warm-up, `evenkeel train`. Phases are the learner's:
waiting for rollouts, scoring, the update, the publish, checkpoints. Medians leave out the first three steps. The share
in kernels is nvidia-smi's utilization: of its sampling period, a sixth of a second or more, when some kernel ran.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.check import Figures, Goal, Scale

NAME = "loop"
AFTER = ("stack.imports", "stack.engine")
PARTS = ("one",)
DEADLINE_S = 400.0
COMMAND_DEADLINE_S, STOP_S = 330.0, 30.0
STEPS, WARM_STEPS, WARM_UP_STEPS = 20, 3, 99
WATCH = ("nvidia-smi", "--query-gpu=timestamp,utilization.gpu", "--format=csv,noheader,nounits")
PHASES = ("wait", "logprobs", "update", "publish", "save")
GOALS = (
    Goal(figure="steps", what="steps that were trained and published", at_least=float(STEPS)),
    Goal(figure="step_s", what="a step", unit="s", at_most=2.0),
    Goal(figure="kernel_share", what="share of these steps in kernels, of learner or engine", at_least=0.6),
    *(Goal(figure=f"{phase}_s", what=f"of it: {phase}", unit="s") for phase in PHASES),
    Goal(figure="rollout_tokens_s", what="response tokens a second of the whole loop"),
    Goal(figure="lowest_ess", what="lowest effective sample size of a step"),
    Goal(figure="k3", what="mean k3 KL, learner and FP8 engine", unit="nats"),
    Goal(figure="reward", what="mean reward by step"),
    Goal(figure="warm_up_s", what="model and supervised warm-up before it", unit="s"),
)


def run(scale: Scale) -> Figures:
    import time

    from pipeline.data.event_log import read_metrics

    began = time.perf_counter()
    recipe, overrides = rehearsed(scale) if scale.rehearsal else shipped(scale)
    scale.keep(warm_up_s=time.perf_counter() - began)
    busy = scale.folder / "utilization.csv"
    with busy.open("w") as output:
        watch = None if scale.rehearsal else subprocess.Popen([*WATCH, "-lms", "100"], stdout=output)
        try:
            evenkeel("train", str(recipe), *overrides)
        finally:  # of a run that broke off, what it did
            if watch is not None:
                watch.terminate()
            metrics = read_metrics(scale.runs / "loop")
            if len(metrics) > WARM_STEPS:
                scale.keep(**summary(metrics))
                span = metrics[WARM_STEPS - 1]["time"], metrics[-1]["time"]
                scale.keep(kernel_share="needs a GPU" if watch is None else kernel_share(busy.read_text(), *span))
    return {}


def kernel_share(lines: str, begins: float, ends: float) -> float:
    """Mean of what nvidia-smi wrote, `2026/11/27 04:05:30.123, 57` a line, between two times since the epoch."""
    from datetime import datetime

    shares = []
    for line in lines[: lines.rfind("\n")].splitlines():  # the last may be cut off
        moment, _, percent = line.partition(", ")
        if begins <= datetime.strptime(moment, "%Y/%m/%d %H:%M:%S.%f").timestamp() <= ends:
            shares.append(int(percent) / 100)
    return statistics.fmean(shares)


def shipped(scale: Scale) -> tuple[Path, list[str]]:
    """The recipe with a model that was just made and warmed up."""
    from tests.gpu.engines import ONE_GPU
    from tests.support.runs import ROOT

    base, warm = scale.folder / "base", scale.folder / "warm"
    evenkeel("model", "new", str(base), "--config", str(ROOT / "pipeline/recipes/models/qwen3-0.6b"))
    common = ["--set", f"run.root={scale.runs}"]
    evenkeel(
        *("sft", str(ONE_GPU), "--out", str(warm), "--steps", str(WARM_UP_STEPS), "--batch-size", "64"),
        *("--lr", "3.0e-4", "--set", f"model.path={base}", "--set", "model.check_tokenizer=false", *common),
    )
    warmed = ["--set", f"model.path={warm}", "--set", "model.check_tokenizer=false"]  # few characters, Qwen3's rows
    return ONE_GPU, [*warmed, "--set", "run.name=loop", "--set", f"run.steps={STEPS}", *common]


def rehearsed(scale: Scale) -> tuple[Path, list[str]]:
    """A tiny recipe of as many steps, over the same channel in the same precisions."""
    from tests.support.runs import make_model, make_recipe

    return make_recipe(
        scale.folder,
        make_model(scale.folder / "tiny"),
        "loop",
        run=dict(name="loop", root=str(scale.runs), steps=STEPS),
        rollout=dict(precision="fp8_block"),
        learner=dict(precision="bf16"),
        weights=dict(channel="ipc"),
        evaluation=dict(every=STEPS),
    ), []


def evenkeel(*arguments: str) -> None:
    """One command of ours, its output in this check's log. Raises RuntimeError when it fails or takes too long; it is
    then asked to end, so that it ends its own processes."""
    print("evenkeel", *arguments, flush=True)
    command = subprocess.Popen([sys.executable, "-m", "launch.cli", *arguments], stdin=subprocess.DEVNULL)
    try:
        status = command.wait(COMMAND_DEADLINE_S)
    except subprocess.TimeoutExpired:
        command.terminate()
        command.wait(STOP_S)
        raise RuntimeError(f"evenkeel {arguments[0]} took more than {COMMAND_DEADLINE_S:.0f} s") from None
    if status:
        raise RuntimeError(f"evenkeel {arguments[0]} ended with status {status}")


def summary(metrics: Sequence[dict[str, Any]]) -> Figures:
    """From the lines of metrics, one a step."""
    late = metrics[WARM_STEPS:]
    step_s = (late[-1]["time"] - metrics[WARM_STEPS - 1]["time"]) / len(late)
    table: list[object] = [["step", *PHASES, "reward", "ess", "k3_kl"]]
    table += [
        [line["step"], *(round(line["seconds"].get(phase, 0.0), 4) for phase in PHASES)]
        + [round(float(line.get(name, 0.0)), 6) for name in ("reward_mean", "ess", "k3_kl")]
        for line in metrics
    ]
    tokens = statistics.fmean(line["num_tokens"] for line in late)
    return {
        "steps": float(len(metrics)),
        "step_s": step_s,
        **{f"{phase}_s": statistics.median(line["seconds"].get(phase, 0.0) for line in late) for phase in PHASES},
        "rollout_tokens_s": tokens / step_s,
        "lowest_ess": min(line["ess"] for line in metrics),
        "k3": statistics.fmean(line["k3_kl"] for line in metrics),
        "reward": [float(line["reward_mean"]) for line in metrics],
        "seconds of each step": table,
    }
