"""Audit a run for `evenkeel verify history RUN`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.build.components import build_limits, build_solved_prompt_rule
from pipeline.analysis.audit import find_gaps, verify_history
from pipeline.control.files import ControlFiles
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import all_recipes, recipe_in_force
from pipeline.repair import find_damage, repaired_paths


def check_history(path: Path) -> dict[str, Any]:
    """Return what is wrong with a run: counts of lost and duplicated groups, of tokens whose version the schedule
    forbids, and of groups asked or skipped against their problem's pass rate; samples with impossible values; damaged
    files; and steps and versions without a record. Batches known as lost by damage are listed, but not wrong.

    It reads the batches, the lags that the ESS controller decided, the records of steps and repairs, the model's
    config.json if it is there, and every file, as `evenkeel repair` does.
    """
    run = RunDirectory(path)
    recipe, decided = recipe_in_force(path).recipe, ControlFiles(run.control, run.fence).newest()
    if recipe.controller is None:
        decided = None  # a parent's lags, which do not hold for a fork without a controller
    schedule = replace(recipe.build_schedule(), decided_lags=() if decided is None else decided.lags)
    limits = build_limits(recipe)
    damaged = [f"{one.path}: {one.problem}" for one in find_damage(run)]
    prompts = [one.recipe.prompts for one in all_recipes(path)]
    solved_rule = build_solved_prompt_rule(recipe) if prompts == prompts[:1] * len(prompts) else None
    audit = verify_history(path, schedule, recipe.run.steps, solved_rule, limits, run.forked_at())
    repaired = sorted(repaired_paths(run))
    gaps = find_gaps(run, repaired)
    return dict(
        lost=len(audit.lost),
        duplicated=len(audit.duplicated),
        version_violations=audit.version_violations,
        solved_violations=len(audit.solved_violations),
        value_faults=list(audit.value_faults),
        vocabulary_checked=limits.vocab_size is not None,
        missing_batches=len(audit.missing),
        lost_by_damage=[str(batch) for batch in audit.damaged],
        removed_batches=len(audit.removed),
        without_record=gaps,
        repaired=repaired,
        batches=audit.batches,
        groups=audit.groups,
        dropped=audit.dropped,
        zero_variance=audit.zero_variance,
        solved=audit.solved,
        tokens=audit.tokens,
        lag_tokens={str(lag): count for lag, count in audit.lags.items()},
        damaged=damaged,
        ok=audit.sound and not gaps and not damaged,
    )
