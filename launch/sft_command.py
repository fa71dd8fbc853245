"""The `evenkeel sft` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.recipe_options import Overrides, RecipePath
from launch.show.output import AsJson, emit_or_print

DATA_LR, TINY_MODEL_LR = 1e-5, 3e-3


def sft(
    recipe: RecipePath,
    out: Annotated[Path, typer.Option(help="Folder for the trained HF model.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 220,
    batch_size: Annotated[int, typer.Option(min=1, help="Demonstrations a step.")] = 128,
    lr: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Peak learning rate. Default: 1e-5 with --data, 3e-3 on demonstrations (tiny, random models)."
        ),
    ] = None,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Steps in which the learning rate rises linearly.")] = 50,
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
    from pipeline.config.loader import load_recipe

    result = run_sft(
        load_recipe(recipe, overrides or []),
        out,
        steps=steps,
        batch_size=batch_size,
        lr=lr if lr is not None else TINY_MODEL_LR if data is None else DATA_LR,
        warmup_steps=warmup_steps,
        data=data,
        held_out=held_out,
    )
    emit_or_print(result, as_json)
