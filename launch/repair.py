"""Define `evenkeel repair`: find damage and, if asked, repair it while no role of the run is at work."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.terminal import AsJson, emit

if TYPE_CHECKING:
    from pipeline.data.run_directory import RunDirectory

_CLOCK_S = 5.0


def repair(
    run: Annotated[Path, typer.Argument(help="Run directory, for example runs/demo.", show_default=False)],
    apply: Annotated[
        bool, typer.Option("--apply", help="Carry out the repair; without this, only print the plan.")
    ] = False,
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
    result = repair_run(run, do=apply, stopped=stopped)
    if as_json:
        emit(result)
    elif result["whole"]:
        print(f"{run}: every file that is there is whole")
    else:
        for one in result["repairs"]:
            print(f"{one['path']}: {one['problem']}\n    {one['becomes']}")
        done = f"done; what was damaged lies in {result['set_aside']}"
        print(done if result["applied"] else f"nothing was changed; to do it: evenkeel repair {run} --apply")
        print(result["after"])
    raise typer.Exit(0 if result["whole"] or result["applied"] else 1)


def repair_run(path: Path, *, do: bool, stopped: bool) -> dict[str, Any]:
    """Return the damage of a run and its repairs; with `do`, carry them out. Raises StoreError for a folder that is no
    run or whose recipe is damaged, RunConflictError while the run is at work."""
    from launch.run.claim import claimed
    from pipeline.data.epochs import claim
    from pipeline.data.run_directory import RunDirectory
    from pipeline.repair import apply, find_damage, plan_repair, set_aside, stamp

    run = RunDirectory(path)
    plan = plan_repair(run, find_damage(run), stamp())
    aside = ""
    if do and plan.repairs:
        refuse_at_work(run, stopped=stopped)
        set_aside(run, [one.path for one in plan.repairs if one.path.name == "NEWEST"])  # a claim would fail on it
        with claimed(run) as epoch:
            for role in ("learner", "collector"):
                claim(run.path, role)  # a frozen process will find that it is superseded
            epoch.check()
            aside = str(apply(run, plan_repair(run, find_damage(run), stamp())))
    return dict(
        run=str(path),
        whole=not plan.repairs,
        applied=bool(aside),
        repairs=[
            dict(path=str(one.path.relative_to(run.path)), problem=one.problem, becomes=one.becomes)
            for one in plan.repairs
        ],
        set_aside=aside,
        after=plan.after,
    )


def refuse_at_work(run: RunDirectory, *, stopped: bool) -> None:
    """Raise RunConflictError while a process of the run lives here, or may live on another host. Only the user knows
    about other hosts, and confirms by `stopped`. Supervisors have a heartbeat instead (launch.run.claim)."""
    import psutil

    from pipeline.data.checksums import read_sealed_json
    from pipeline.data.run_directory import numbered_files
    from pipeline.errors import RunConflictError, StoreError

    epochs = run.path / "epochs"
    for folder in sorted({*epochs.glob("*")} - {epochs / "supervisor"}):
        starts = [*numbered_files(folder, "").values()]
        if not starts:
            continue
        try:
            claimed = read_sealed_json(starts[-1], "")
        except StoreError:
            claimed = dict(host="an unknown host", pid="?")
        who = f"{folder.name} (process {claimed.get('pid')} on {claimed.get('host')})"
        if claimed.get("host") != socket.gethostname():
            if not stopped:
                raise RunConflictError(
                    f"whether {who} has ended cannot be seen from here; look there, and once it has, say so by "
                    "--stopped"
                )
            continue
        try:
            lives = psutil.Process(int(claimed["pid"])).create_time() <= float(claimed["time"]) + _CLOCK_S
        except (psutil.NoSuchProcess, KeyError, ValueError):
            lives = False
        if lives:
            raise RunConflictError(f"{run.path} is at work: {who}; stop it first, then repair the run")
