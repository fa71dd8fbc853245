"""A tiny run: two engines behind a router, two ranks, a checkpoint and an evaluation every two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.chaos.kills.plan import Plan
from tests.support.runs import make_recipe

SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": dict(kind="sync"),
    "async": dict(kind="async", lag=1),
    "staged": dict(kind="staged", updates_per_stage=2),
}


def write_recipe(folder: Path, model: Path, plan: Plan) -> Path:
    """The recipe of a plan's run, FOLDER/runs/run."""
    data: dict[str, Any] = dict(
        run=dict(steps=plan.steps, max_restarts=12),
        schedule=SCHEDULES[plan.schedule],
        rollout=dict(engines=2, prompts_per_batch=2, group_size=2, max_new_tokens=6),
        learner={plan.layout: 2, "micro_batch_tokens": 128},
        reward=dict(workers=1),
        evaluation=dict(every=2, prompts=2, samples=1),
        weights=dict(channel=plan.channel),
    )
    for name, keys in plan.overrides.items():
        data[name] = {**data.get(name, {}), **keys}
    return make_recipe(folder, model, "run", **data)
