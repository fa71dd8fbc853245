"""What was measured, as one table: a row for each model, depth and map."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.data.files import write_atomically
from tests.evidence.at_32b.readout import FORK_ENTROPY, FORK_SHARE


@dataclass(frozen=True)
class Point:
    """One map at one depth of one model. KL and chi^2 are means over all tokens, of which FORK_SHARE are forks."""

    study: str
    kind: str
    hidden: int
    planned: int
    """Layers of the model."""
    depth: int
    """Layers that the stream has passed."""
    seed: int
    map: str
    error: float
    kl: float
    chi2: float
    parts: tuple[float, ...] = ()
    """KL by position, in parts of equal length; of long rows only."""


@dataclass(frozen=True)
class Measured:
    points: tuple[Point, ...]
    local: dict[str, float]
    """`group.format` → relative error of one product on unquantized input, mean over the layers of the true shapes."""

    def of(self, study: str, map_: str, kind: str | None = None) -> list[Point]:
        return [
            one for one in self.points if one.study == study and one.map == map_ and (kind is None or one.kind == kind)
        ]

    def last(self, study: str, kind: str | None = None) -> dict[str, Point]:
        """Map → its deepest point, of the first seed."""
        found: dict[str, Point] = {}
        for one in sorted(self.points, key=lambda point: (point.depth, -point.seed)):
            if one.study == study and (kind is None or one.kind == kind):
                found[one.map] = one
        return found


def read(folder: Path) -> Measured:
    """All cases of `folder`, or the reduced table that `save` wrote."""
    if folder.is_file():
        stored = json.loads(folder.read_text(encoding="utf-8"))
        names = stored["columns"]
        rows = (dict(zip(names, row, strict=True)) for row in stored["points"])
        return Measured(tuple(Point(**{**row, "parts": tuple(row["parts"])}) for row in rows), stored["local"])
    points: list[Point] = []
    local: dict[str, float] = {}
    for path in sorted(folder.glob("*.json")):
        case = json.loads(path.read_text())
        points += _points(case)
        if case["study"] == "shapes" and case["local"]:
            local |= _means(case["local"])
    return Measured(tuple(points), local)


def save(measured: Measured, path: Path) -> None:
    """The table, small enough for the repository."""
    rows = [list(asdict(one).values()) for one in measured.points]
    lines = ",\n".join(json.dumps(row) for row in rows)
    names = json.dumps(list(Point.__dataclass_fields__))
    write_atomically(
        path, f'{{"columns": {names},\n"local": {json.dumps(measured.local)},\n"points": [\n{lines}\n]}}\n'
    )


def _points(case: dict[str, object]) -> Iterable[Point]:
    readouts = case["readouts"]
    assert isinstance(readouts, dict)
    for depth, maps in readouts.items():
        for name, quantities in maps.items():
            chi2, kl = quantities[f"chi2@{FORK_ENTROPY}"], quantities[f"kl@{FORK_ENTROPY}"]
            yield Point(
                study=str(case["study"]),
                kind=str(case["kind"]),
                hidden=int(str(case["hidden"])),
                planned=int(str(case["layers"])),
                depth=int(depth),
                seed=int(str(case["seed"])),
                map=name,
                error=quantities["error"]["mean"],
                kl=FORK_SHARE * kl["mean"],
                chi2=FORK_SHARE * chi2["mean"],
                parts=tuple(FORK_SHARE * part for part in kl.get("parts", ())),
            )


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: math.fsum(row[name] for row in rows) / len(rows) for name in rows[0]}
