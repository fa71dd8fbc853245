"""`evenkeel export`: a run's metrics in the files of another tool, beside the run and without a word to it.

Every step is in the destination once. What it holds is compared with the run: what is missing is added, and where it
holds a step that a resume has taken back, it is cleared and written anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from launch.export.destination import Destination
from launch.export.points import STEP, VERSION, Key, Point, RunPoints
from pipeline.analysis.run_log import RunLog
from pipeline.data.files import make_folder
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import recipe_file
from pipeline.errors import RecipeError, RunConflictError

Target = Literal["tensorboard", "wandb", "mlflow", "trackio"]
TARGETS: tuple[str, ...] = get_args(Target)
DATABASES = ("mlflow", "trackio")
"""Which hold several runs side by side."""
LOOK_S = 2.0
PRECISION_S = 1e-3
"""Of the times that destinations hold."""


def export(run: Path, target: str, out: Path | None, *, follow: bool) -> dict[str, Any]:
    """Bring the destination up to date with a run; `follow`: until the run is finished. `out` is RUN/exports/TARGET
    where it is None. Returns what it then holds.

    Raises RecipeError (unknown target), StoreError (no run directory) and RunConflictError (another
    exporter is at work there).
    """
    log = RunLog.read(run)
    for sentence in log.damage:
        print(f"warning: {sentence}; the export is without them", file=sys.stderr)
    if target not in TARGETS:
        raise RecipeError(f"--to is {target!r}, expected {', '.join(TARGETS[:-1])} or {TARGETS[-1]}")
    folder = out or run / "exports" / target
    directory = RunDirectory(run)
    with (
        _alone(folder, f".{run_id(log)}.lock" if target in DATABASES else ".lock"),
        _opened(target, folder, log) as destination,
    ):
        exporter = Exporter(RunPoints(run), destination)
        while True:
            finished = directory.is_finished()  # asked first: what was written before it is read after it
            exporter.look()
            if finished or not follow:
                break
            time.sleep(LOOK_S)
        held = exporter.held
        counts = {f"{kind}s": sum(key.kind == kind for key in held) for kind in (STEP, VERSION)}
    return dict(path=str(folder), **counts, written=exporter.written, next=destination.said())


@dataclass
class Exporter:
    """Keeps a destination equal to the points of a run."""

    points: RunPoints
    destination: Destination
    written: int = 0

    def __post_init__(self) -> None:
        self.held: dict[Key, float] = dict(self.destination.held())

    def look(self) -> None:
        """Write what is new; begin again where the destination holds what the run does not."""
        points = self.points.read()
        if any(key not in points or _is_another(points[key], moment) for key, moment in self.held.items()):
            self.destination.clear()
            self.held.clear()
        for point in _missing(points, self.held):
            self.destination.write(point)
            self.held[point.key] = point.time
            self.written += 1
        self.destination.flush()


def _is_another(point: Point, moment: float) -> bool:
    """Whether what is held of a step is an earlier training of it."""
    return abs(point.time - moment) > PRECISION_S


def _missing(points: Mapping[Key, Point], held: Mapping[Key, float]) -> list[Point]:
    return [point for key, point in points.items() if key not in held]


def _opened(target: str, folder: Path, log: RunLog) -> Destination:
    if target == "tensorboard":
        from launch.export.tensorboard import TensorBoardFiles

        return TensorBoardFiles(folder)
    name, config = log.recipe.run.name, log.recipe.model_dump(mode="json")
    if target == "mlflow":
        from launch.export.mlflow import MLflowDatabase

        return MLflowDatabase(folder, name, run_id(log), config)
    if target == "trackio":
        from launch.export.trackio import TrackioDatabase

        return TrackioDatabase(folder, name, run_id(log), config)
    from launch.export.wandb import WandbFolder

    return WandbFolder(folder, name, run_id(log), config)


def run_id(log: RunLog) -> str:
    """What a run is called where several may be: the same for all its exports, and another for another run of its name.
    It is made from the recipe that the run began with, as it is stored, and its first event."""
    began = log.events[0]["time"] if log.events else 0.0
    name = re.sub("[^A-Za-z0-9_-]", "-", log.recipe.run.name)[:40]
    digest = hashlib.sha256(f"{began}\n".encode() + recipe_file(log.run_dir).read_bytes()).hexdigest()
    return f"{name}-{digest[:8]}"


@contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """Refuse a second exporter on this host: both would write each step."""
    make_folder(folder)
    with (folder / name).open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunConflictError(
                f"another exporter is at work in {folder}; wait for it, stop it, or give another --out"
            ) from None
        yield
