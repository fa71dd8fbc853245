"""`evenkeel export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.terminal import AsJson, emit


def export(
    run: Annotated[Path, typer.Argument(help="Run directory, for example runs/demo.", show_default=False)],
    to: Annotated[str, typer.Option(help="tensorboard or wandb.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; default: RUN/exports/TOOL.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run is finished.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's metrics for another tool: TensorBoard's event files, or an offline run of Weights & Biases.

    A process of its own, which reads the run directory and opens no connection; the run does not know of it. Call it
    again whenever you like: every step is there once, also after a kill, and a step that a resume trained again is
    there as it was trained last. It needs the tool's package, and says how to install it.

    For example:  evenkeel export runs/demo --to tensorboard --follow
    """
    from launch.export.export import export as write_points

    result = write_points(run, to, out, follow=follow)
    if as_json:
        emit(result)
        return
    print(f"{result['path']}: {result['steps']} steps, {result['versions']} evaluations")
    print(result["next"])
