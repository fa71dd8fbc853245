"""Runs a job of a conversion in processes of its own, under a deadline that grows with the bytes to move."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.run.processes import child_environment, run_ranks, torchrun
from pipeline.data.run_directory import RunDirectory

SLOWEST_BYTES_S = 5e6
"""Ranks that are slower than this, after ten minutes of grace, have hung."""


def run_job(
    module: str,
    job: dict[str, Any],
    num_processes: int | None,
    num_bytes: int,
    watch: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run `module` on a job in ranks, or (None) in one plain process; returns what it left in result.json."""

    with tempfile.TemporaryDirectory(prefix="evenkeel-convert-") as scratch:
        run = RunDirectory(Path(scratch))
        run.logs.mkdir()
        (run.path / "job.json").write_text(json.dumps(job), encoding="utf-8")
        ranks = [sys.executable, "-P", "-m", module, scratch]
        command = ranks if num_processes is None else torchrun(num_processes, module, scratch)
        deadline = 600.0 + num_bytes / SLOWEST_BYTES_S
        log = run.logs / "conversion.log"
        run_ranks(run, command, log=log, env=child_environment(), watch=watch, deadline_s=deadline)
        path = run.path / "result.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
