"""`evenkeel fork RUN NEW --at STEP`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.terminal import AsJson, Overrides, emit


def fork(
    run: Annotated[Path, typer.Argument(help="Run directory that has the checkpoint.", show_default=False)],
    new: Annotated[Path, typer.Argument(help="Run directory to make; a name alone: beside RUN.", show_default=False)],
    at: Annotated[int, typer.Option(min=1, help="Step of the checkpoint to go on from.", show_default=False)],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Make a new run from a checkpoint of an old one, where keys may change that a resume may not.

    The new run has the weights, the optimizer's state, the batches and the records of the first STEP steps, linked
    where the file system can and each compared with its checksum. Later batches stay behind. RUN is not changed.
    """
    from launch.fork.fork import fork_run

    made = fork_run(run, new, at, overrides or [])
    if as_json:
        emit(made)
    else:
        print(f"{made['run']} begins at step {at} of {run}; go on with `evenkeel train {made['recipe']}`")
