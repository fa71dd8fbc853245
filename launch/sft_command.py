"""The `evenkeel sft` command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.recipe_options import Overrides, RecipePath
from launch.show.output import AsJson, emit_or_print
from pipeline.errors import RecipeError

if TYPE_CHECKING:
    from pipeline.config.recipe import Recipe

_FALLS = "sft's rate falls linearly to zero; leave it out"
INSTEAD = {
    "run.steps": "give --steps",
    "learner.optimizer.lr": "give --lr",
    "learner.optimizer.warmup_steps": "give --warmup-steps",
    "learner.optimizer.decay": _FALLS,
    "learner.optimizer.decay_steps": _FALLS,
    "learner.optimizer.min_lr": _FALLS,
}
"""Recipe key that sft does not go by → what to do."""


def sft(
    recipe: RecipePath,
    out: Annotated[Path, typer.Option(help="Folder for the trained HF model.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 220,
    batch_size: Annotated[int, typer.Option(min=1, max=2**20, help="Demonstrations a step.")] = 128,
    lr: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Peak learning rate. Default: 1e-5 with --data, 3e-3 on demonstrations (tiny, random models)."
        ),
    ] = None,
    warmup_steps: Annotated[
        int | None,
        typer.Option(
            min=0, help="Steps in which the learning rate rises linearly. Default: a quarter of --steps, at most 50."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help='Your own rows instead of the task\'s: {"prompt", "response"} or {"messages"}; JSON Lines, Parquet, a '
            "saved dataset (docs/sft.md)."
        ),
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option(metavar="SHARE|FILE", help="With --data: rows whose loss is measured, not trained on."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Supervised fine-tuning, with the same Megatron-Core learner and checkpoint format: on the task's demonstrations,
    or on --data.

    Reads model, task and learner of the recipe. The learning rate rises for --warmup-steps, then falls linearly to
    zero.
    """
    from launch.run.sft import run_sft

    result = run_sft(
        read_recipe(recipe, overrides or [], steps, data),
        out,
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        warmup_steps=warmup_steps,
        data=data,
        held_out=held_out,
    )
    emit_or_print(result, as_json)


def read_recipe(path: Path | Mapping[str, Any], overrides: Sequence[str], steps: int, data: Path | None) -> Recipe:
    """The recipe to fine-tune by. It need not say for how many `steps`, nor, with `data`, what its task reads. Raises
    RecipeError, also for an override that sft would not go by."""
    from pipeline.config.loader import load_recipe, overridden_keys

    for key in overridden_keys(overrides):
        if key in INSTEAD:
            raise RecipeError(f"--set {key}: evenkeel sft does not go by it; {INSTEAD[key]}")
    return load_recipe(path, overrides, fill_in=partial(fill_in, steps=steps, rows=data))


def fill_in(recipe: dict[str, Any], *, steps: int, rows: Path | None) -> None:
    """Add `run.steps` to a recipe that lacks it, and the task that reads `rows` to one without a task, or without what
    its task reads."""
    if isinstance(run := recipe.get("run"), dict):
        run.setdefault("steps", steps)
    if rows is not None:
        task = recipe.setdefault("task", dict(name="data"))
        if isinstance(task, dict) and task.get("name") == "data" and not task.get("sources"):
            task.setdefault("path", str(rows.absolute()))
