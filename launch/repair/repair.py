"""Find damage, plan its repair and, if asked, carry it out: while no role of the run is at work, and so that none that
was only frozen goes on afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.repair.at_work import refuse_at_work
from launch.run.claim import claimed
from pipeline.data.epochs import claim
from pipeline.data.run_directory import RunDirectory
from pipeline.repair.apply import apply, set_aside, stamp
from pipeline.repair.damage import find_damage
from pipeline.repair.plan import Plan, plan_repair


def repair_run(path: Path, *, do: bool, stopped: bool) -> dict[str, Any]:
    """What is damaged, what becomes of it, and, with `do`, that it was done. Raises StoreError for a folder that is no
    run or whose recipe is damaged, RunConflictError while the run is at work."""
    run = RunDirectory(path)
    plan = _plan(run)
    aside = ""
    if do and plan.repairs:
        refuse_at_work(run, stopped=stopped)
        set_aside(run, [one.path for one in plan.repairs if one.path.name == "NEWEST"])  # claims could not count on it
        with claimed(run) as epoch:
            for role in ("learner", "collector"):
                claim(run.path, role)  # one that was frozen finds that it is superseded
            epoch.check()
            aside = str(apply(run, _plan(run)))
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


def _plan(run: RunDirectory) -> Plan:
    return plan_repair(run, find_damage(run), stamp())
