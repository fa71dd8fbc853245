"""Where the points of a scaling curve come from: run directories, and JSONL files of any origin."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.analysis.run_log import RunLog, number
from pipeline.analysis.scaling.sigmoid import Floats, Points
from pipeline.analysis.steps import COMPUTE_AXES, spent_by_version, steps_of
from pipeline.errors import RecipeError, StoreError


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Score over compute as read, sorted by compute."""

    name: str
    x: str
    y: str
    compute: Floats
    """[n] ≥ 0."""
    score: Floats
    """[n]"""


def read_curve(source: Path, x: str | None, y: str | None) -> Curve:
    """A run directory or a JSONL file.

    A run: `x` is one of COMPUTE_AXES (default samples) and `y` a field of its `evaluated` events (default pass_at_1).
    JSONL: `x` and `y` name fields; lines that lack either are passed over, as a log mixes kinds of line. Raises
    StoreError when the source cannot be read or holds no point, RecipeError when a field must be chosen first.
    """
    if source.is_dir():
        curve = _run_curve(source, x or "samples", y or "pass_at_1")
    elif source.is_file():
        curve = _file_curve(source, x, y)
    else:
        raise StoreError(f"{source} does not exist; give the folder of a run or a JSONL file")
    if curve.compute.min() < 0.0:
        raise StoreError(f"{source}: {curve.x} goes down to {curve.compute.min():g}, expected compute from 0 upwards")
    return curve


def points_of(curves: Sequence[Curve], *, r0: float | None = None, skip: float = 0.0) -> Points:
    """The points to fit: all those above `skip` (and above zero) of all curves, which are repeats of one setting.

    `r0` is taken as exact. Otherwise the point of least compute of each curve measures R_0 (of a run: version 0), is
    no point of the fit, and counts as one measurement with noise; `skip` does not touch it.
    """
    compute = np.concatenate([curve.compute for curve in curves])
    score = np.concatenate([curve.score for curve in curves])
    keep = (compute > 0.0) & (compute >= skip)
    if r0 is None:
        first = np.concatenate([curve.compute == curve.compute.min() for curve in curves])
        keep &= ~first
        measured = score[first]
        return Points.of(compute[keep], score[keep], float(measured.mean()), start_weight=len(measured))
    return Points.of(compute[keep], score[keep], r0, start_weight=math.inf)


def _run_curve(run: Path, x: str, y: str) -> Curve:
    if x not in COMPUTE_AXES:
        raise RecipeError(f"--x {x} is not known for a run, expected one of {', '.join(COMPUTE_AXES)}")
    run_log = RunLog.read(run)
    scores = {int(event["version"]): number(event, y) for event in run_log.evaluations}
    known = {version: score for version, score in scores.items() if score is not None}
    if not known:
        raise StoreError(f"{run} has no evaluation with a number {y!r} yet; train on, or choose another --y")
    spent = spent_by_version(steps_of(run_log), x)
    missing = [version for version in known if version >= len(spent)]
    if missing:
        raise StoreError(
            f"{run}: version {missing[0]} was evaluated, but the {x} of step {len(spent) - 1} are in no log; put back "
            "copies of the run's metrics, events and batches, or choose another --x"
        )
    versions = sorted(known)
    return Curve(
        name=run.name,
        x=x,
        y=y,
        compute=np.array([spent[version] for version in versions]),
        score=np.array([known[version] for version in versions]),
    )


def _file_curve(path: Path, x: str | None, y: str | None) -> Curve:
    lines = _read_lines(path)
    fields = sorted({key for line in lines for key in line if number(line, key) is not None})
    if x is None or y is None:
        raise RecipeError(f"{path} is no run: name its fields with --x and --y; it has numbers in {_listed(fields)}")
    for name in (x, y):
        if name not in fields:
            raise StoreError(f"{path} has no number in a field {name!r}, only in {_listed(fields)}")
    read = [(number(line, x), number(line, y)) for line in lines]
    known = np.array(sorted((c, r) for c, r in read if c is not None and r is not None), np.float64)
    if not len(known):
        raise StoreError(f"{path} has no line with both {x!r} and {y!r}; write them on the same line")
    return Curve(name=path.stem, x=x, y=y, compute=known[:, 0], score=known[:, 1])


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read {path} ({error}); give a JSONL file, one JSON object a line") from error
    for count, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise StoreError(f"{path}, line {count} is not JSON ({error}); correct or remove it") from error
        if not isinstance(value, dict):
            raise StoreError(f"{path}, line {count} is {type(value).__name__}, expected a JSON object")
        lines.append(value)
    return lines


def _listed(fields: Sequence[str]) -> str:
    return ", ".join(fields) or "none"
