"""Count the starts in a row of a job, or of a role, without progress of its run.

Kubernetes has no supervisor and cannot see progress, so there each role counts its starts. Progress resets the count.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pipeline.data.checksums import read_sealed_json, write_sealed_json
from pipeline.data.files import make_folder
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import FatalError, StoreError

MAX_RESTARTS_VARIABLE = "EVENKEEL_MAX_RESTARTS"
"""Environment variable of an unsupervised role: its most restarts in a row without progress."""


def progress(run: RunDirectory) -> tuple[int, ...]:
    """Return published version, newest checkpoint, and numbers of settled batches and of evaluations."""
    published = run.published_version() if run.is_published() else -1
    return published, max(run.saved_steps(), default=-1), run.num_settled(), len(run.evaluated_versions())


def in_a_row(path: Path, reached: tuple[int, ...]) -> int:
    """Return the count that was stored at `path` with the progress `reached`; 0 if there is none."""
    try:
        found = read_sealed_json(path, "it is counted anew")
        return int(found["in_a_row"]) if found["reached"] == list(reached) else 0
    except (OSError, StoreError, KeyError, TypeError, ValueError):
        return 0


def note_in_a_row(path: Path, reached: tuple[int, ...], count: int) -> None:
    """Store the count at `path`; ignore errors, such as a full disk."""
    with suppress(OSError):
        make_folder(path.parent)
        write_sealed_json(path, dict(in_a_row=count, reached=reached))


def count_start(
    run: RunDirectory, role: str, environment: Mapping[str, str] = os.environ, *, back: bool = False
) -> None:
    """Count a start of an unsupervised role; with `back`, undo the count for a role that was asked to end. Raises
    FatalError after too many starts without progress."""
    most = environment.get(MAX_RESTARTS_VARIABLE, "")
    if not most.isdecimal() or environment.get("EVENKEEL_NODE", "0") != "0":  # node 0 counts for all nodes
        return
    with suppress(OSError, StoreError):  # the role itself reports an outage
        path, reached = run.logs / "restarts" / f"{role}.json", progress(run)
        starts = in_a_row(path, reached) + (-1 if back else 1)
        if starts - 1 > int(most):
            path.unlink(missing_ok=True)  # a user who starts it again has removed the cause
            raise FatalError(
                f"{role} was started again {most} times in a row without progress (run.max_restarts); see the first "
                "error in the logs of its pods, then delete the JobSet and apply it again"
            )
        note_in_a_row(path, reached, max(0, starts))
