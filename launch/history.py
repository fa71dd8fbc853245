"""`evenkeel verify history RUN`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.history import verify_history
from pipeline.rundir import RunDirectory


def check_history(path: Path) -> dict[str, Any]:
    """Counts of lost and duplicated groups and of tokens with a forbidden version, read from the batches alone."""
    recipe = RunDirectory(path).recipe()
    history = verify_history(path, recipe.build_schedule(), recipe.run.steps)
    ok = not (history.lost or history.duplicated or history.version_violations)
    return {**asdict(history), "ok": ok}
