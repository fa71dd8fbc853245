"""Samples a second of the whole loop, sync and async lag 1, beside TRL's GRPOTrainer in the same run.

Same model (random Qwen3), prompts, reward, group, batch and optimizer steps; fp32, all cores of this machine. Three
rows: `fixed`, answers of 32 tokens; `varying`, geometric lengths of mean 64 cut at 256; `many`, four times as many of
those. Lengths come from the model itself: one channel of its residual stream is constant, so the LM head's weight on it
sets the chance of the end token. The sides take turns, and the first steps of every run are left out (start-up, warm
caches). Printed are medians of the repetitions, and the smallest and largest ratio. Compare only ratios between
machines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from launch.convert.new_model import new_model
from pipeline.data.event_log import read_metrics
from tests.bench.figures import spread, tell
from tests.support.runs import ROOT, evenkeel_json

GROUP, WARM_STEPS = 8, 3
PROMPTS = "prompts.jsonl"
BENCH_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
SCHEDULES: dict[str, dict[str, Any]] = dict(sync=dict(kind="sync"), **{"async": dict(kind="async", lag=1)})


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of batch."""

    prompts: int
    max_new_tokens: int
    end_chance: float
    """Of the end token, at every position."""

    @property
    def samples(self) -> int:
        return self.prompts * GROUP


ROWS = dict(
    fixed=Row(prompts=8, max_new_tokens=32, end_chance=0.0),
    varying=Row(prompts=8, max_new_tokens=256, end_chance=1 / 64),
    many=Row(prompts=32, max_new_tokens=256, end_chance=1 / 64),
)


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


def recipe_of(folder: Path, model: Path, row: Row, schedule: str, steps: int) -> dict[str, Any]:
    """What is trained; the prompts lie beside `folder`."""
    longest = row.max_new_tokens
    return dict(
        run=dict(name=f"{folder.name}-{schedule}", root=str(folder / "runs"), steps=steps),
        model=dict(path=str(model)),
        task=dict(name="data", path=str(folder.parent / PROMPTS), reward="tests.support.rewards:digit_share"),
        rollout=dict(
            precision="fp32",
            prompts_per_batch=row.prompts,
            group_size=GROUP,
            max_new_tokens=longest,
            context_tokens=longest + 64,
        ),
        learner=dict(precision="fp32", data_parallel=os.cpu_count(), micro_batch_tokens=8192, optimizer=dict(lr=1e-6)),
        objective=dict(name="clipped"),
        schedule=SCHEDULES[schedule],
        checkpoint=dict(every=10_000),
        evaluation=dict(every=10_000, prompts=1, samples=1),
    )


def ours(folder: Path, model: Path, row: Row, schedule: str, steps: int) -> float:
    """Seconds a step of `evenkeel train`, from its metrics."""
    recipe = recipe_of(folder, model, row, schedule, steps)
    path = folder / f"{schedule}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    evenkeel_json("train", path, timeout=1200)
    return step_seconds([line["time"] for line in read_metrics(folder / "runs" / recipe["run"]["name"])])


def trl(folder: Path, model: Path, row: Row, steps: int) -> float:
    """Seconds a step of GRPOTrainer, in the benchmark's own environment."""
    settings = dict(
        model=str(model),
        prompts=str(folder.parent / PROMPTS),
        output=str(folder / "trl"),
        batch=row.samples,
        group=GROUP,
        max_new_tokens=row.max_new_tokens,
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
    return step_seconds(json.loads(done.stdout.splitlines()[-1])["ends"])


def step_seconds(ends: Sequence[float]) -> float:
    """Mean seconds between ends of steps after the warm ones."""
    late = ends[WARM_STEPS - 1 :]
    return (late[-1] - late[0]) / (len(late) - 1)


def write_prompts(folder: Path) -> None:
    """Of 31 digits each."""
    rng = random.Random(0)
    prompts = ["".join(rng.choices("0123456789", k=31)) + "=" for _ in range(512)]
    (folder / PROMPTS).write_text("\n".join(json.dumps(dict(prompt=prompt, answer="")) for prompt in prompts))


def measure(folder: Path, row: Row, steps: int, repetitions: int) -> dict[str, Any]:
    """Samples a second of each side and their ratios to TRL, of one row."""
    seconds: dict[str, list[float]] = {side: [] for side in ("trl", *SCHEDULES)}
    for repetition in range(repetitions):
        place = folder / f"{repetition}"
        place.mkdir()
        make_model(model := place / "model", row.end_chance)
        for side in seconds if repetition % 2 == 0 else reversed(seconds):
            found = trl(place, model, row, steps) if side == "trl" else ours(place, model, row, side, steps)
            seconds[side].append(found)
    result: dict[str, Any] = {
        f"{side}_samples_per_s": row.samples / statistics.median(taken) for side, taken in seconds.items()
    }
    for side in SCHEDULES:
        ratios = [trl_s / ours_s for trl_s, ours_s in zip(seconds["trl"], seconds[side], strict=True)]
        result[f"{side}_over_trl"] = spread(ratios)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--row", choices=ROWS, action="append", help="default: all")
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for name in arguments.row or ROWS:
        with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as scratch:
            folder = Path(scratch)
            write_prompts(folder)
            results[name] = measure(folder, ROWS[name], arguments.steps, arguments.repetitions)
    tell(results)


if __name__ == "__main__":
    main()
