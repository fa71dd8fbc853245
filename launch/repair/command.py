"""The `evenkeel repair` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from launch.terminal import AsJson, emit


def repair(
    run: Annotated[Path, typer.Argument(help="Run directory, for example runs/demo.", show_default=False)],
    apply: Annotated[bool, typer.Option("--apply", help="Do it; without this, only say what would be done.")] = False,
    stopped: Annotated[
        bool, typer.Option("--stopped", help="You have seen to it that no process of the run lives on another host.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find every damaged or missing file of a run, and make the run one that can go on.

    What can be made again is: a batch by the collector, a policy by the learner, a step from an older checkpoint. A
    batch that no engine may answer for any more is recorded as lost; the run goes on without it, and
    `evenkeel verify history` says so. Nothing is deleted: what is damaged goes to RUN/damaged.

    Changes nothing without --apply, and exits 1 if there is something to repair. Refused while the run is at work.
    """
    from launch.repair.repair import repair_run

    result = repair_run(run, do=apply, stopped=stopped)
    if as_json:
        emit(result)
    else:
        print("\n".join(_lines(result)))
    raise typer.Exit(0 if result["whole"] or result["applied"] else 1)


def _lines(result: dict[str, Any]) -> list[str]:
    if result["whole"]:
        return [f"{result['run']}: every file that is there is whole"]
    lines = [f"{one['path']}: {one['problem']}\n    {one['becomes']}" for one in result["repairs"]]
    if result["applied"]:
        return [*lines, f"done; what was damaged lies in {result['set_aside']}", result["after"]]
    return [*lines, f"nothing was changed; to do it: evenkeel repair {result['run']} --apply", result["after"]]
