"""Samples a second of the whole loop, sync and async lag 1, beside TRL's GRPOTrainer in the same run.

Same model (random Qwen3), prompts, reward, group, batch and optimizer steps; fp32, all cores of this machine. Two kinds
of answers: `fixed`, always 32 tokens, and `varying`, geometric lengths of mean 64 cut at 256. Lengths come from the
model itself: one channel of its residual stream is constant, so the LM head's weight on it sets the chance of the end
token. The first steps of every run are left out (start-up, warm caches). Compare only ratios between machines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from launch.convert.new_model import new_model
from pipeline.data.event_log import read_metrics
from tests.support.runs import ROOT, evenkeel_json

GROUP, PROMPTS, WARM_STEPS = 8, 8, 3
BENCH_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
KINDS = dict(fixed=dict(max_new_tokens=32, end_chance=0.0), varying=dict(max_new_tokens=256, end_chance=1 / 64))


def make_model(folder: Path, end_chance: float) -> None:
    """A random model whose end token has the same chance at every position, whatever came before."""
    new_model(folder, layers=4, hidden=256, ffn=768)
    tensors = load_file(folder / "model.safetensors")
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0  # no layer writes to channel 0 …
    tensors["model.embed_tokens.weight"][:, 0] = 8.0  # … which every token sets alike
    head = tensors["lm_head.weight"]
    head[:] *= 0.01
    others = math.log(len(head) - 1)
    wanted = -30.0 if end_chance == 0 else math.log(end_chance / (1 - end_chance)) + others
    head[:, 0] = 0.0
    head[end] = 0.0
    head[end, 0] = wanted / channel_after_norm(tensors)
    save_file(tensors, folder / "model.safetensors", metadata=dict(format="pt"))


def channel_after_norm(tensors: dict[str, torch.Tensor]) -> float:
    """Channel 0 of the final norm's output, roughly: 8 over the RMS of an embedding with that channel."""
    rows = tensors["model.embed_tokens.weight"].double()
    return float((8.0 / rows.pow(2).mean(1).sqrt()).mean() * tensors["model.norm.weight"][0])


def ours(folder: Path, model: Path, kind: str, schedule: dict[str, Any], steps: int) -> dict[str, float]:
    """Seconds a step of `evenkeel train`, from its metrics."""
    name = f"{kind}-{schedule['kind']}"
    longest = KINDS[kind]["max_new_tokens"]
    recipe = dict(
        run=dict(name=name, root=str(folder / "runs"), steps=steps),
        model=dict(path=str(model)),
        task=dict(name="jsonl", path=str(folder / "prompts.jsonl"), reward="tests.support.rewards:digit_share"),
        rollout=dict(prompts_per_batch=PROMPTS, group_size=GROUP, max_new_tokens=longest, context_tokens=longest + 64),
        learner=dict(data_parallel=os.cpu_count(), micro_batch_tokens=8192, optimizer=dict(lr=1e-6)),
        objective=dict(name="clipped"),
        schedule=schedule,
        checkpoint=dict(every=10_000),
        evaluation=dict(every=10_000, prompts=1, samples=1),
    )
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    evenkeel_json("train", path, timeout=1200)
    metrics = read_metrics(folder / "runs" / name)
    length = statistics.fmean(line["response_tokens_mean"] for line in metrics)
    return dict(step_s=step_seconds([line["time"] for line in metrics]), mean_tokens=length)


def trl(folder: Path, model: Path, kind: str, steps: int) -> dict[str, float]:
    """Seconds a step of GRPOTrainer, in the benchmark's own environment."""
    settings = dict(
        model=str(model),
        prompts=str(folder / "prompts.jsonl"),
        output=str(folder / "trl"),
        batch=PROMPTS * GROUP,
        group=GROUP,
        max_new_tokens=KINDS[kind]["max_new_tokens"],
        steps=steps,
        threads=os.cpu_count(),
    )
    done = subprocess.run(
        [BENCH_PYTHON, "-m", "tests.bench.trl_grpo", json.dumps(settings)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=1200,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if done.returncode != 0:
        raise SystemExit(f"error: TRL failed: {done.stderr[-2000:]}")
    return dict(step_s=step_seconds(json.loads(done.stdout.splitlines()[-1])["ends"]))


def step_seconds(ends: Sequence[float]) -> float:
    """Mean seconds between ends of steps after the warm ones."""
    late = ends[WARM_STEPS - 1 :]
    return (late[-1] - late[0]) / (len(late) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    samples = PROMPTS * GROUP
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as scratch:
        folder = Path(scratch)
        rng = random.Random(0)
        lines = [json.dumps(dict(prompt="".join(rng.choices("0123456789", k=31)) + "=", answer="")) for _ in range(512)]
        (folder / "prompts.jsonl").write_text("\n".join(lines))
        for kind, setting in KINDS.items():
            model = folder / f"model-{kind}"
            make_model(model, float(setting["end_chance"]))
            baseline = trl(folder, model, kind, arguments.steps)
            row: dict[str, Any] = dict(trl_samples_per_s=samples / baseline["step_s"])
            for schedule in (dict(kind="sync"), dict(kind="async", lag=1)):
                found = ours(folder, model, kind, schedule, arguments.steps)
                row[f"{schedule['kind']}_samples_per_s"] = samples / found["step_s"]
                row[f"{schedule['kind']}_over_trl"] = baseline["step_s"] / found["step_s"]
                row["mean_response_tokens"] = found["mean_tokens"]
            results[kind] = row
            print(kind, {key: round(value, 2) for key, value in row.items()}, file=sys.stderr)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
