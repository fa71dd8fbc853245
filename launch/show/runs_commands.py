"""The `evenkeel runs` commands: what one run has reached, which runs there are, and how several differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.terminal import AsJson, emit

runs_app = typer.Typer(help="Look at runs.", no_args_is_help=True)


@runs_app.command("show")
def runs_show(
    run: Annotated[Path, typer.Argument(help="Run directory, for example runs/demo.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Print what a run has reached: pass@1 first and last, steps, wall time, layout, precision."""
    from launch.show.runs import print_summary
    from pipeline.analysis.summary import summary

    result = summary(run)
    if as_json:
        emit(result)
    else:
        print_summary(result)


@runs_app.command("list")
def runs_list(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs of a folder: state, steps, held-out pass@1, training reward, wall time.

    A run that cannot be read has its reason in its row and hides no other.
    """
    from pipeline.analysis.run_list import list_runs

    found = list_runs(folder)
    if as_json:
        emit(dict(folder=str(folder), runs=found))
        return
    from rich.console import Console

    from launch.show.runs import render_list

    Console().print(render_list(folder, found))


@runs_app.command("compare")
def runs_compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, two or more.", show_default=False)],
    html: Annotated[
        Path | None, typer.Option(help="Write a page with curves over steps, samples and seconds.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the headline numbers of several runs side by side, and the recipe keys in which they differ.

    A row in which all runs say the same is left out of the table; --json has every number.
    """
    from pipeline.analysis.run_list import compare_runs

    result = compare_runs(runs)
    if html is not None:
        from pipeline.analysis.pages.comparison import write_comparison

        result["page"] = str(write_comparison(runs, html))
    if as_json:
        emit(result)
        return
    from rich.console import Console

    from launch.show.runs import render_comparison

    Console().print(render_comparison(result))
    if html is not None:
        print(f"page: {html}")
