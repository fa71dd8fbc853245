"""The weights that an engine starts with, held for as long as it starts.

A learner deletes old policies (weights.keep), and SGLang opens its files many seconds after it was started: in a run of
fast steps they would be gone. So an engine starts from a folder of hard links of its own.

    RUN/engines/starting/000003-0-000002/   engine 3, its first host, its second start; removed once it is up

Each start has a folder of its own. A start that is superseded may end late, and must not take its successor's weights.
Of an engine on several hosts, the others link what the first one holds: ranks with parts of two versions would serve
neither.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pipeline.data.run_directory import RunDirectory, numbered
from pipeline.errors import StoreError
from pipeline.ports.weight_check import verify_policy
from rollout_sglang.server.start import EngineSpec

_ATTEMPTS = 20


def starting_folder(run: RunDirectory, index: int, node: int, start: int) -> Path:
    """Where a host of an engine holds what one start of it begins with."""
    return run.path / "engines" / "starting" / f"{numbered(index)}-{node}-{numbered(start)}"


def hold_weights(
    run: RunDirectory,
    index: int,
    node: int,
    start: int,
    newest: Callable[[], EngineSpec],
    held: Callable[[EngineSpec], None] = lambda _: None,
) -> EngineSpec:
    """`newest()`, with a folder that no learner deletes; `release_weights` does once the engine is up.

    `start` counts the starts of the engine. What earlier ones have left on this host is removed. `held` is told what it
    will be, before all of it is read. Raises StoreError when every policy is deleted while it is linked, or when a file
    is not as it was written, or that of another version.
    """
    folder = starting_folder(run, index, node, start)
    for left in folder.parent.glob(f"{numbered(index)}-{node}-*"):
        if int(left.name.rpartition("-")[2]) < start:
            shutil.rmtree(left, ignore_errors=True)
    for _ in range(_ATTEMPTS):
        spec = newest()
        if _link(spec.model, folder):
            held(spec)
            verify_policy(folder, spec.version, f"stop the run; `evenkeel repair {run.path}` has it made anew")
            return replace(spec, model=folder)
    raise StoreError(
        f"{spec.model}, and those before it, were deleted while they were linked to {folder}; raise weights.keep"
    )


def release_weights(spec: EngineSpec) -> None:
    """Remove the folder that `hold_weights` made. May be called twice."""
    shutil.rmtree(spec.model, ignore_errors=True)


def _link(source: Path, folder: Path) -> bool:
    """Whether `folder` now holds every file of `source`, which may be deleted meanwhile."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        names = _files(source)
        for name in names:
            os.link(source / name, folder / name)
        return _files(source) == names != []
    except FileNotFoundError:
        return False


def _files(folder: Path) -> list[str]:
    """The weights for engines with an older quant map are in a folder within it, which no engine starts with."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
