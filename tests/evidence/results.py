"""What is kept of a cell: its evaluations prompt by prompt, the chosen metrics by step, and how it ended.

    run directory ──harvest──▶ Result ──▶ docs/evidence/EXPERIMENT.json ──▶ page and plots

The page is made from the JSON alone, so it can be made again where the run directories are gone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.analysis.run_log import RunLog
from pipeline.data.event_log import read_events
from pipeline.data.files import write_atomically
from pipeline.rollout.evaluation import pass_at_k
from tests.evidence.hypotheses import Curve
from tests.evidence.matrix import Cell
from tests.evidence.statistics import Array

State = Literal["missing", "unfinished", "finished", "diverged", "failed"]
SETTLED: tuple[State, ...] = ("finished", "diverged")
"""Running it again would tell nothing new."""
DIGITS = 5
"""Significant digits of a metric that is kept."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out scores of one policy version."""

    version: int
    samples: int
    """Answers to each prompt."""
    correct: list[int]
    """[prompts] how many of them were right."""
    trained_s: float
    """Seconds since the first batch was asked for, without those of evaluations."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One cell, as far as it got."""

    condition: str
    arm: str
    seed: int
    state: State
    reason: str
    """Why it diverged or failed; empty otherwise."""
    steps: int
    steps_planned: int
    samples_per_step: int
    evaluations: list[Evaluation]
    series: dict[str, list[float | None]]
    """Metric → value of each step from 0; None where it is missing."""

    def pass_at(self, k: int) -> Array:
        """[evaluations, prompts]."""
        return np.array([[pass_at_k(e.samples, c, k) for c in e.correct] for e in self.evaluations])

    @property
    def versions(self) -> list[int]:
        return [evaluation.version for evaluation in self.evaluations]


def state_of(directory: Path) -> tuple[State, str]:
    """How a run directory stands, with the reason when it went wrong."""
    if not (directory / "recipe.yaml").exists():
        return "missing", ""
    if any(event["kind"] == "finished" for event in read_events(directory)):
        return "finished", ""
    notes = [json.loads(note.read_text()) for note in (directory / "logs" / "fatal").glob("*.json")]
    if not notes:
        return "unfinished", ""
    said = max(notes, key=lambda note: note["time"])
    return ("diverged" if said.get("error") == "NonFiniteError" else "failed"), str(said["message"])


def harvest(cell: Cell, series: Sequence[str]) -> Result | None:
    """Read the cell's run directory; None when it was never started."""
    state, reason = state_of(cell.directory)
    if state == "missing":
        return None
    history = RunLog.read(cell.directory)
    rollout = history.recipe.rollout
    return Result(
        condition=cell.condition,
        arm=cell.arm,
        seed=cell.seed,
        state=state,
        reason=reason,
        steps=history.num_steps,
        steps_planned=history.recipe.run.steps,
        samples_per_step=rollout.prompts_per_batch * rollout.group_size,
        evaluations=_evaluations(history),
        series={name: _series(history, name) for name in series},
    )


def _evaluations(history: RunLog) -> list[Evaluation]:
    """With the seconds that training took before each: from the first batch to the publish of that version, less what
    commits waited for evaluations. A pause between two sessions of a cell counts, so timed cells should not be
    interrupted."""
    issued = [float(event["time"]) for event in history.of_kind("issued")]
    begin = min(issued, default=0.0)
    published = {int(event["version"]): float(event["time"]) for event in history.of_kind("published")}
    held = {int(event["batch"]): float(event["seconds"]["evaluate"]) for event in history.of_kind("committed")}
    found = []
    for event in history.evaluations:
        version = int(event["version"])
        started = float(event["started"])
        at = published.get(version, started)  # where the event was lost, a publish comes before its evaluation
        spent = sum(seconds for batch, seconds in held.items() if batch < version)
        found.append(
            Evaluation(
                version=version,
                samples=int(event["samples"]),
                correct=[int(count) for count in event["correct"]],
                trained_s=round(max(0.0, at - begin - spent), 2),
            )
        )
    return found


def _series(history: RunLog, name: str) -> list[float | None]:
    values: list[float | None] = [None] * history.num_steps
    for step, value in zip(*history.series(name), strict=True):
        values[step] = float(f"{value:.{DIGITS}g}")
    return values


def save(path: Path, results: Iterable[Result]) -> None:
    """One line a cell, so that a changed cell is a changed line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(result), separators=(",", ":")) for result in results]
    write_atomically(path, "[\n" + ",\n".join(lines) + "\n]\n")


def load(path: Path) -> list[Result]:
    """What `save` wrote; nothing when there is no such file."""
    if not path.exists():
        return []
    return [_result(data) for data in json.loads(path.read_text(encoding="utf-8"))]


def keep(path: Path, cells: Sequence[Cell], series: Sequence[str], states: Collection[State]) -> None:
    """Write what the run directories of the cells hold, of those in one of the states; any other cell keeps what was
    harvested before, also one that is declared no more. Writes nothing where nothing is known."""
    known = {(one.condition, one.arm, one.seed): one for one in load(path)}
    for cell in cells:
        if state_of(cell.directory)[0] in states and (found := harvest(cell, series)):
            known[cell.condition, cell.arm, cell.seed] = found
    declared = [key for cell in cells if (key := (cell.condition, cell.arm, cell.seed)) in known]
    if known:
        save(path, [known[key] for key in dict.fromkeys([*declared, *known])])


def unmeasured(path: Path, cells: Sequence[Cell]) -> list[Cell]:
    """Those of which no result is kept. A cell that is declared otherwise than when it ran needs another name."""
    known = {(one.condition, one.arm, one.seed) for one in load(path)}
    return [cell for cell in cells if (cell.condition, cell.arm, cell.seed) not in known]


def _result(data: dict[str, Any]) -> Result:
    return Result(**{**data, "evaluations": [Evaluation(**evaluation) for evaluation in data["evaluations"]]})


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The cells of one arm in one condition, seeds together."""

    results: list[Result]
    """By seed; those that finished or diverged, with at least one evaluation."""

    @staticmethod
    def of(results: Iterable[Result], condition: str, arm: str, seeds: Iterable[int] | None = None) -> Arm:
        """Cells of `arm` in `condition` that came to their end, of the given seeds or of all."""
        chosen = None if seeds is None else set(seeds)
        found = [
            result
            for result in results
            if (result.condition, result.arm) == (condition, arm)
            and result.state in SETTLED
            and result.evaluations
            and (chosen is None or result.seed in chosen)
        ]
        return Arm(results=sorted(found, key=lambda result: result.seed))

    @property
    def seeds(self) -> list[int]:
        return [result.seed for result in self.results]

    @property
    def versions(self) -> list[int]:
        """Evaluated versions: of a diverged cell also those that it never reached. Where every cell diverged,
        those that one came to, and the end that none did."""
        alive = [set(result.versions) for result in self.results if result.state == "finished"]
        gone = [{*result.versions, result.steps_planned} for result in self.results]
        return sorted(set.intersection(*alive) if alive else set.union(*gone))

    def curve(self, k: int = 1) -> Array:
        """[seeds, evaluations, prompts] pass@k. After it diverged a run has no policy: it scores 0."""
        return np.stack([_at_versions(result, self.versions, k) for result in self.results])

    def run_curve(self, k: int = 1) -> Curve:
        """The same with the run as the unit: mean over prompts, and what each version had cost."""
        seconds = [{e.version: e.trained_s for e in result.evaluations} for result in self.results]
        return Curve(
            versions=tuple(self.versions),
            values=self.curve(k).mean(axis=2),
            samples=np.array([[v * r.samples_per_step for v in self.versions] for r in self.results], float),
            seconds=np.array([[known.get(v, math.inf) for v in self.versions] for known in seconds]),
        )

    def costs(self, cost: Literal["samples", "seconds"]) -> Array:
        """[evaluations] samples trained on, or mean seconds of training, up to each version."""
        if cost == "samples":
            return np.array(self.versions, float) * self.results[0].samples_per_step
        finished = [r for r in self.results if set(self.versions) <= set(r.versions)]
        rows = [[{e.version: e.trained_s for e in r.evaluations}[v] for v in self.versions] for r in finished]
        return np.mean(rows, axis=0) if rows else np.full(len(self.versions), math.inf)

    def metric(self, name: str) -> list[list[float]]:
        """The known values of one metric, seed by seed."""
        return [[value for value in result.series.get(name, []) if value is not None] for result in self.results]


def _at_versions(result: Result, versions: Sequence[int], k: int) -> Array:
    scores = dict(zip(result.versions, result.pass_at(k), strict=True))
    gone = np.zeros_like(next(iter(scores.values())))
    return np.stack([scores.get(version, gone) for version in versions])
