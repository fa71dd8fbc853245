"""Count how often in a row a job, or a role, was started without progress of its run.

Under `evenkeel train` and Slurm a supervisor counts what dies. On Kubernetes there is none, and Kubernetes cannot see
progress: there each role counts its own starts. Progress forgives all earlier ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pipeline.data.checksums import read_sealed_json, write_sealed_json
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import FatalError, StoreError

MAX_RESTARTS_VARIABLE = "EVENKEEL_MAX_RESTARTS"
"""Environment of a role that nobody supervises: how often in a row it may be started again without progress."""


def progress(run: RunDirectory) -> tuple[int, ...]:
    """Return what a further start goes on from: the published version, the newest checkpoint, batches and evaluations.
    A stage of several steps publishes once, and saves meanwhile."""
    published = run.published_version() if run.is_published() else -1
    return published, max(run.saved_steps(), default=-1), run.num_settled(), len(run.evaluated_versions())


def in_a_row(path: Path, reached: tuple[int, ...]) -> int:
    """Return the count that is noted there, if the run has not gone beyond `reached` since."""
    try:
        found = read_sealed_json(path, "it is counted anew")
        return int(found["in_a_row"]) if found["reached"] == list(reached) else 0
    except (OSError, StoreError, KeyError, TypeError, ValueError):
        return 0


def note_in_a_row(path: Path, reached: tuple[int, ...], count: int) -> None:
    """Note the count; on a full disk nothing is."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed_json(path, dict(in_a_row=count, reached=reached))


def count_start(
    run: RunDirectory, role: str, environment: Mapping[str, str] = os.environ, *, back: bool = False
) -> None:
    """Count a start of a role that nobody supervises. Raises FatalError at one too many without progress. `back`: take
    back that of a role that was asked to end, which starts again by nobody's fault."""
    most = environment.get(MAX_RESTARTS_VARIABLE, "")
    if not most.isdecimal() or environment.get("EVENKEEL_NODE", "0") != "0":  # node 0 counts for its others
        return
    with suppress(OSError, StoreError):  # a file system that does not answer: the role says so itself
        path, reached = run.logs / "restarts" / f"{role}.json", progress(run)
        starts = in_a_row(path, reached) + (-1 if back else 1)
        if starts - 1 > int(most):
            path.unlink(missing_ok=True)  # who starts it again has seen to it
            raise FatalError(
                f"{role} was started again {most} times in a row without progress (run.max_restarts); see the first "
                "error in the logs of its pods, then delete the JobSet and apply it again"
            )
        note_in_a_row(path, reached, max(0, starts))
