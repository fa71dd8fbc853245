"""Write a run's numbers in the format of another tool, without a change to the run.

    train/reward_mean  seconds/update  mismatch/age/0/k3_kl      of a line of metrics (docs/metrics.md), at its step
    evaluation/pass_at_1  evaluation/pass_at_k/8                 of an evaluation, at its version

A resume trains the steps after its checkpoint again, so a step may have several lines. The line of the learner's latest
start counts, and lines of an earlier start count only below the first step of every later start. Each start of the
exporter writes every point anew; an exporter that follows a run does so when steps are taken back.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pipeline.analysis.run_log import RunLog, numbers
from pipeline.data.event_log import LogTail, log_files
from pipeline.data.files import make_folder
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import recipe_file
from pipeline.errors import RecipeError, RunConflictError

if TYPE_CHECKING:
    from launch.export.tensorboard import TensorBoardFiles
    from launch.export.wandb import WandbFolder

TARGETS = ("tensorboard", "wandb")
LOOK_S = 2.0


def export(run: Path, target: str, out: Path | None, *, follow: bool) -> dict[str, Any]:
    """Write all points of a run and, with `follow`, those that come until the run is finished; return how much `out`
    holds, by default RUN/exports/TARGET. Raises RecipeError (unknown target), StoreError (no run directory) and
    RunConflictError (another exporter is at work there)."""
    log = RunLog.read(run)
    for sentence in log.damage:
        print(f"warning: {sentence}; the export is without them", file=sys.stderr)
    if target not in TARGETS:
        raise RecipeError(f"--to is {target!r}, expected {' or '.join(TARGETS)}")
    folder, held, tail = out or run / "exports" / target, dict[Key, float](), RunPoints(run)
    with _alone(folder):
        opened: TensorBoardFiles | WandbFolder
        if target == "tensorboard":
            from launch.export.tensorboard import TensorBoardFiles

            opened = TensorBoardFiles(folder)
        else:
            from launch.export.wandb import WandbFolder

            opened = WandbFolder(folder, log.recipe.run.name, run_id(log), log.recipe.model_dump(mode="json"))
        with closing(opened) as destination:
            destination.clear()
            while True:
                finished = RunDirectory(run).is_finished()  # asked first, so that lines written before the end are read
                points = tail.read()
                if any(key not in points or points[key].time != moment for key, moment in held.items()):
                    destination.clear()
                    held.clear()
                for key, point in points.items():
                    if key not in held:
                        destination.write(point)
                        held[key] = point.time
                destination.flush()
                if finished or not follow:
                    break
                time.sleep(LOOK_S)
    counts = {f"{kind}s": sum(key.kind == kind for key in held) for kind in ("step", "version")}
    return dict(path=str(folder), **counts, next=opened.hint)


def run_id(log: RunLog) -> str:
    """Return an id that all exports of a run share and no other run of its name has. It is made from the stored recipe
    with which the run began and the time of its first event."""
    began = log.events[0]["time"] if log.events else 0.0
    name = re.sub("[^A-Za-z0-9_-]", "-", log.recipe.run.name)[:40]
    digest = hashlib.sha256(f"{began}\n".encode() + recipe_file(log.run_dir).read_bytes()).hexdigest()
    return f"{name}-{digest[:8]}"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Refuse a second exporter on this host: both would write each step."""
    make_folder(folder)
    with (folder / ".lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunConflictError(
                f"another exporter is at work in {folder}; wait for it, stop it, or give another --out"
            ) from None
        yield


class Key(NamedTuple):
    """The step or version of a point."""

    kind: Literal["step", "version"]
    number: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """Numbers of a step or version. `time` (seconds since 1970) tells a step from the same step trained again."""

    key: Key
    time: float
    values: Mapping[str, float]


@dataclass
class RunPoints:
    """A reader of the points of a run that may still grow."""

    run: Path
    _metrics: LogTail = field(init=False)
    _events: LogTail = field(init=False)
    _starts: dict[str, dict[int, Point]] = field(init=False, default_factory=dict)
    """Log file of a start of the learner → step → point."""
    _versions: dict[int, Point] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._metrics, self._events = LogTail(self.run, "metrics"), LogTail(self.run, "events")

    def read(self) -> dict[Key, Point]:
        """Return all points in the logs so far, by time."""
        for start, line in self._metrics.new_lines():
            found = {name if "/" in name else f"train/{name}": value for name, value in numbers(line)}
            values = {name: value for name, value in found.items() if name not in ("train/step", "train/time")}
            point = Point(key=Key("step", line["step"]), time=float(line["time"]), values=values)
            self._starts.setdefault(start, {})[point.key.number] = point
        for _, event in self._events.new_lines():
            if event["kind"] == "evaluated":
                told = [one for one in numbers(event) if one[0] not in ("version", "due", "time")]
                values = {f"evaluation/{name}": value for name, value in told}
                point = Point(key=Key("version", event["version"]), time=float(event["time"]), values=values)
                self._versions[point.key.number] = point
        steps: dict[int, Point] = {}
        for path in log_files(self.run, "metrics"):
            if lines := self._starts.get(path.name):
                steps = {step: point for step, point in steps.items() if step < min(lines)} | lines
        points = [point for point in (*steps.values(), *self._versions.values()) if point.values]
        return {point.key: point for point in sorted(points, key=lambda point: (point.time, point.key))}
