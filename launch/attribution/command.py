"""The `evenkeel mismatch` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.progress import going_on
from launch.recipe_options import Overrides, check_recipe_or_run
from launch.show.output import AsJson, emit


def mismatch(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|RUN",
            help="A recipe (fresh rollouts of its model), or a run directory (a batch that it recorded).",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for mismatch.json, .html, .png; default: runs/NAME-mismatch.")
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(min=1, max=2**20, help="RECIPE: prompts to sample; default: rollout.prompts_per_batch."),
    ] = None,
    now: Annotated[
        Path | None, typer.Option(help="RECIPE: HF folder of the weights that are trained; default: model.path.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=0, help="RUN: batch index; default: the last one trained.")] = None,
    locate: Annotated[
        bool, typer.Option("--locate/--no-locate", help="Search for faults of single modules; a pass for each.")
    ] = True,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Where does the mismatch of learner and engine come from?

    Splits the log-ratio of every sampled token into staleness, quantization, (for mixtures) routing, kernels and
    decoding; the terms add up exactly. Starts one engine and one learner of the recipe's layout. Writes a page of plots
    and says in a paragraph what to do. See docs/precision.md.
    """
    check_recipe_or_run(source)  # before Megatron and SGLang are imported
    from launch.attribution.measure import measure

    with going_on("an engine and a learner score the same tokens"):
        result = measure(source, overrides or [], out=out, num_prompts=prompts, now=now, batch=batch, locate=locate)
    if as_json:
        emit(result)
        return
    print(result["verdict"])
    print(f"page: {result['page']}")
