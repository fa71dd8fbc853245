"""The `evenkeel trajectories` commands: what was sampled, as text for people or as a file for other tools."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.terminal import AsJson, emit
from pipeline.errors import RecipeError

trajectories_app = typer.Typer(help="Read what was sampled.", no_args_is_help=True)
RunPath = Annotated[Path, typer.Argument(help="Run directory, for example runs/demo.", show_default=False)]


@trajectories_app.command("show")
def trajectories_show(
    run: RunPath,
    batch: Annotated[int, typer.Argument(help="Batch index.", min=0, show_default=False)],
    limit: Annotated[int, typer.Option(min=1, help="Samples to print.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Print prompts, completions, rewards and the logprob gap of each token of one batch.

    With --json: text, reward and log-ratio of each sample, without the single tokens.
    """
    from launch.show.trajectories import as_mapping, show

    if as_json:
        emit(as_mapping(run, batch, limit))
    else:
        show(run, batch, limit)


@trajectories_app.command("export")
def trajectories_export(
    run: RunPath,
    parquet: Annotated[Path | None, typer.Option(help="Parquet file to write.", show_default=False)] = None,
    jsonl: Annotated[Path | None, typer.Option(help="JSON Lines file to write.", show_default=False)] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Steps A to B - 1; default: all.", show_default=False)
    ] = None,
    reward_min: Annotated[float | None, typer.Option(help="Lowest reward to keep.", show_default=False)] = None,
    reward_max: Annotated[float | None, typer.Option(help="Highest reward to keep.", show_default=False)] = None,
    search: Annotated[
        str | None, typer.Option(help="Keep samples with this text in prompt or response.", show_default=False)
    ] = None,
    finish: Annotated[
        Literal["stop", "length"] | None,
        typer.Option(help="Keep samples that ended so: by themselves, or at the limit of tokens.", show_default=False),
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="Keep samples of this one of task.sources.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write samples as Parquet or JSON Lines: prompt and response as text, reward and its parts, versions, log-ratios.

    One row a sample, in the order of the steps; a limit on rewards leaves out samples that have none. Files that are
    there are replaced.

    For example:  evenkeel trajectories export runs/demo --jsonl wrong.jsonl --steps 90:100 --reward-max 0
    """
    from launch.show.trajectories import Filter, export

    if (parquet is None) == (jsonl is None):
        raise RecipeError("give one of --parquet FILE and --jsonl FILE")
    if steps is not None and re.fullmatch(r"\d{1,9}:\d{1,9}", steps) is None:
        raise RecipeError(f"--steps is {steps!r}, expected A:B, for example 10:12 for steps 10 and 11")
    first, end = (None, None) if steps is None else map(int, steps.split(":"))
    chosen = Filter(
        first=first, end=end, reward_min=reward_min, reward_max=reward_max, search=search, finish=finish, source=source
    )
    result = export(run, parquet=parquet, jsonl=jsonl, chosen=chosen)
    if as_json:
        emit(result)
    else:
        print(f"{result['path']}: {result['samples']} of {result['read']} samples of {result['batches']} batches")
