"""A tiny run: two engines behind a router, two ranks, a checkpoint and an evaluation every two steps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from tests.chaos.kills.plan import Plan

SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": dict(kind="sync"),
    "async": dict(kind="async", lag=1),
    "staged": dict(kind="staged", updates_per_stage=2),
}


def write_recipe(folder: Path, model: Path, plan: Plan) -> Path:
    """The recipe of a plan's run, FOLDER/runs/run."""
    rng = random.Random(0)
    prompts = folder / "prompts.jsonl"
    texts = ["".join(rng.choice("0123456789") for _ in range(rng.randint(3, 6))) + "=" for _ in range(200)]
    prompts.write_text("".join(json.dumps(dict(prompt=text, answer="1")) + "\n" for text in texts))
    data: dict[str, Any] = dict(
        run=dict(name="run", root=str(folder / "runs"), steps=plan.steps, max_restarts=12),
        model=dict(path=str(model)),
        task=dict(name="data", path=str(prompts), reward="tests.support.rewards:digit_share"),
        schedule=SCHEDULES[plan.schedule],
        rollout=dict(
            precision="fp32",
            engines=2,
            prompts_per_batch=2,
            group_size=2,
            max_new_tokens=6,
            context_tokens=64,
            request_deadline_s=300,
        ),
        learner={
            plan.layout: 2,
            "precision": "fp32",
            "micro_batch_tokens": 128,
            "optimizer": dict(lr=1e-3, warmup_steps=0),
        },
        reward=dict(workers=1),
        checkpoint=dict(every=2),
        evaluation=dict(every=2, prompts=2, samples=1),
        weights=dict(channel=plan.channel),
    )
    for key, value in plan.overrides.items():
        data[key] = {**data.get(key, {}), **value}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(data))
    return path
