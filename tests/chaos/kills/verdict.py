"""What must hold of a run after its worst day: nothing lost, twice or stale; every step recorded; replayed bit for bit;
nothing left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.run_directory import RunDirectory

if TYPE_CHECKING:
    from tests.chaos.kills.driver import Drive


def judge(drive: Drive) -> list[str]:
    """What is wrong; the run has finished."""
    from tests.chaos.kills.driver import ask

    found = list(leftovers(drive.folder, drive.run))  # first: what follows makes files of its own
    found += records(drive.run, drive.plan.steps)
    code, said, error = ask(drive.folder, "history", "verify", "history", str(drive.run), "--json", forked=True)
    audit = json.loads(said) if code == 0 and said.startswith("{") else {}
    if not audit.get("ok"):
        found.append(f"verify history: {error or said}")
    for key in ("lost", "duplicated", "version_violations", "missing_batches"):
        if audit.get(key):
            found.append(f"{key}: {audit[key]}")
    seldom = ("--set", "checkpoint.every=1000")  # which changes no weight, and takes half the time
    code, said, error = ask(drive.folder, "replay", "train", "--replay", str(drive.run), "--json", *seldom, forked=True)
    if code or not json.loads(said).get("bit_identical"):
        found.append(f"replay: {error if code else said}")
    return found


def records(path: Path, steps: int) -> Iterator[str]:
    """What reports and diagnoses need of each step."""
    run = RunDirectory(path)
    have = [line["step"] for line in read_metrics(path)]
    if have != list(range(steps)):
        yield f"metrics of {len(have)} of {steps} steps; missing: {sorted(set(range(steps)) - set(have))}"
    if missing := [step for step in range(steps) if run.learner_logprobs(step) is None]:
        yield f"no log-probabilities of steps {missing}"
    told = {event["version"] for event in read_events(path, "evaluated")}
    if missing := sorted(run.evaluated_versions() - told):
        yield f"no event of the evaluations of versions {missing}"


def leftovers(folder: Path, run: Path) -> Iterator[str]:
    """Files that a process which ended, however, has left."""
    for place in (folder / "tmp", Path("/dev/shm")):
        names = sorted(str(path.relative_to(place)) for path in place.rglob("*"))
        if names and (place.parent != Path("/dev") or os.environ.get("CHAOS_OWN_SHM")):
            yield f"{len(names)} left in {place.name}: {', '.join(names[:4])}"
    temporary = sorted(str(path.relative_to(run)) for path in run.rglob("*.tmp"))
    if temporary:
        yield f"{len(temporary)} temporary files in the run: {', '.join(temporary[:4])}"
