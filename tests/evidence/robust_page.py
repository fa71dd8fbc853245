"""docs/robust.md: which objective works in every cell, why the worst ones fail, and what the seeds could have shown.

Everything follows from robust.yaml and the results; no sentence holds a number of its own.

An arm that is another one without lag was not run in the fresh cells: the other one's runs stand there (`stand_in`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.data.files import write_atomically
from tests.evidence.matrix import Experiment, Matrix
from tests.evidence.plots import draw, draw_shares
from tests.evidence.results import Arm, Result
from tests.evidence.statistics import ALPHA, Spread, visible_difference

BAR = 0.8
"""An arm passes that ends at this share of the best arm, or more, in every cell."""
FRESH = "fresh"
"""The experiment without lag."""
LATE = 0.25
"""The last share of the steps, where a table says what became of a metric."""

Results = Mapping[str, Sequence[Result]]
"""By experiment."""
Place = tuple[str, str]
"""A cell of the table: experiment and condition."""


def write_page(matrix: Matrix, results: Results, path: Path) -> None:
    """The page, and its pictures beside the results."""
    folder = path.parent / "evidence"
    found, cells = scores(matrix, results), _cells(matrix)
    if any(found.values()):
        best, titles = _best(found, cells), _titles(matrix)
        shares = {
            titles[arm]: [row[cell].mean / best[cell] if cell in row and best[cell] else None for cell in cells]
            for arm, row in found.items()
            if row
        }
        draw_shares(shares, list(cells.values()), BAR, folder / "robust.png")
    for name, experiment in matrix.experiments.items():
        if shown := _contrast(experiment, results.get(name, [])):
            draw(shown, results[name], folder / f"robust-{name}.png")
    write_atomically(path, page(matrix, results))


def stand_in(arm: str) -> str:
    """The arm that `arm` is where nothing is stale: age 0 leaves the learning rate, lr / √(1 + 0) is lr, and where
    pi_old is pi both split and decoupled PPO are CISPO."""
    base = _base(arm)
    return "cispo" if base in ("split", "decoupled") else base


def _base(arm: str) -> str:
    """Without what was done to its steps."""
    return arm.removesuffix("_age").removesuffix("_const").removesuffix("_ess")


@dataclass(frozen=True)
class Score:
    """One arm in one cell."""

    ends: list[float]
    """pass@1 of the last version, seed by seed; 0 for a run that diverged."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.ends))

    def __str__(self) -> str:
        each = " ".join(f"{end:.2f}".removeprefix("0") for end in self.ends)
        return f"{self.mean:.2f} ({each})" if len(self.ends) > 1 else each


def scores(matrix: Matrix, results: Results) -> dict[str, dict[Place, Score]]:
    """Arm → (experiment, condition) → its score, where it has one."""
    arms = list(dict.fromkeys(arm for experiment in matrix.experiments.values() for arm in experiment.arms))
    found: dict[str, dict[Place, Score]] = {arm: {} for arm in arms}
    for name, experiment in matrix.experiments.items():
        for condition in experiment.conditions:
            for arm in arms:
                run = arm if arm in experiment.arms else stand_in(arm)
                if run != arm and name != FRESH:
                    continue
                measured = Arm.of(results.get(name, []), condition, run)
                if measured.results:
                    found[arm][name, condition] = _score(measured)
    return found


def _score(measured: Arm) -> Score:
    return Score(measured.curve()[:, -1].mean(axis=1).tolist())


def page(matrix: Matrix, results: Results) -> str:
    """docs/robust.md: the answer, then the table of cells and arms, then what it could have shown."""
    found, cells = scores(matrix, results), _cells(matrix)
    best, titles = _best(found, cells), _titles(matrix)
    header = ["arm", *cells.values(), "worst", "worst ÷ best of the cell"]
    lines = ["# One objective that never collapses?", "", *_answer(found, best, titles), ""]
    lines += ["## Every arm in every cell", "", _row(header), "|---" * len(header) + "|"]
    for arm, row in found.items():
        if row:
            numbers = [str(row[cell]) if cell in row else "–" for cell in cells]
            worst = min(one.mean for one in row.values())
            count = "" if len(row) == len(cells) else f" ({len(row)} of {len(cells)} cells)"
            lines.append(_row([titles[arm], *numbers, f"{worst:.2f}", f"{_ratio(row, best):.2f}{count}"]))
    lines += [
        "",
        "Held-out pass@1 at T = 1 of the last version: the mean, and each seed in brackets; – was not run yet.",
    ]
    if any(found.values()):
        lines += ["", "![Each arm's share of the best arm of its cell](evidence/robust.png)"]
    for name, experiment in matrix.experiments.items():
        measured = results.get(name, [])
        lines += ["", f"## {experiment.title}", "", experiment.text, "", _power(matrix, name, measured)]
        lines += _mechanisms(experiment, measured)
        if _contrast(experiment, measured):
            lines += ["", f"![{experiment.title}](evidence/robust-{name}.png)"]
    return "\n".join(lines).rstrip() + "\n"


def _answer(
    found: Mapping[str, Mapping[Place, Score]], best: Mapping[Place, float], titles: dict[str, str]
) -> list[str]:
    """The bar and who passes it; what is lacking where that cannot be said yet."""
    measured = sum(len(row) for row in found.values())
    whole = {arm: row for arm, row in found.items() if len(row) == len(best)}
    passing = [arm for arm, row in whole.items() if _ratio(row, best) >= BAR]
    least = min((len(one.ends) for row in found.values() for one in row.values()), default=0)
    lines = [
        "Written by `python -m tests.evidence.robust` from `tests/evidence/robust.yaml`, which lists arms, seeds and "
        f"cells and is older than every result. The bar: one arm ends at {BAR} or more of the best arm in every cell. "
        "Small models show mechanisms, not sizes of effects.",
        "",
    ]
    if not measured:
        return [*lines, "**Nothing is measured yet.**"]
    if not whole:
        lines.append(f"**Not known yet:** no arm has been measured in all {len(best)} cells.")
    elif passing:
        lines.append(
            "**Passes the bar:** " + ", ".join(f"{titles[a]} ({_ratio(whole[a], best):.2f})" for a in passing) + "."
        )
    else:
        top = max(whole, key=lambda arm: _ratio(whole[arm], best))
        lines.append(f"**No arm passes the bar.** The nearest is {titles[top]} ({_ratio(whole[top], best):.2f}).")
    if least < 3:
        lines += ["", f"Some cells have {least} seed: a screen, which ranks what to run next and decides nothing."]
    return lines


def _ratio(row: Mapping[Place, Score], best: Mapping[Place, float]) -> float:
    """The arm's worst share of the best arm, over its cells."""
    return min(score.mean / best[cell] if best[cell] > 0.0 else 1.0 for cell, score in row.items())


def _power(matrix: Matrix, name: str, results: Sequence[Result]) -> str:
    """What difference of two arms the seeds of an experiment could show."""
    experiment = matrix.experiments[name]
    ends = [Arm.of(results, c, a) for c in experiment.conditions for a in experiment.arms]
    spread = Spread.of(one.run_curve().end for one in ends if one.results)
    if spread.df < 1 or not spread.sd > 0.0:
        return "What the seeds could show is not known: no arm has two of them."
    runs = min(len(one.results) for one in ends if one.results)
    seeds = f"{runs} seeds" if runs > 1 else "one seed"
    visible = visible_difference(float(spread.sd), runs, spread.df, ALPHA)
    return (
        f"Run-to-run standard deviation {float(spread.sd):.3f} ({spread.df} degrees of freedom). With {seeds} a "
        f"true difference of {visible:.2f} between two arms would be seen four times in five, one comparison at a time."
    )


@dataclass(frozen=True)
class Trace:
    """A figure of a run, out of one metric of its steps."""

    title: str
    metric: str
    of: Callable[[Sequence[float]], float]


def _late(values: Sequence[float]) -> float:
    return float(np.mean(values[-max(1, round(LATE * len(values))) :]))


TRACES = (
    Trace("age", "lag_mean", lambda values: float(np.mean(values))),
    Trace("factor on lr", "lr_factor", lambda values: float(np.mean(values))),
    Trace("lowest ESS", "ess", min),
    Trace("ESS, late", "ess", _late),
    Trace("entropy, late", "entropy", _late),
    Trace("gradient norm, late", "grad_norm", _late),
    Trace("largest gradient norm", "grad_norm", max),
    Trace("solved in training, best", "solve_rate", max),
    Trace("solved in training, late", "solve_rate", _late),
)


def _mechanisms(experiment: Experiment, results: Sequence[Result]) -> list[str]:
    """A table a condition, best arm first: what ESS, entropy, gradient and step size did."""
    traces = [trace for trace in TRACES if trace.metric in experiment.series]
    header = ["arm", "pass@1 at the end", *(trace.title for trace in traces)]
    lines: list[str] = []
    for condition, variant in experiment.conditions.items():
        arms = {arm: Arm.of(results, condition, arm) for arm in experiment.arms}
        ends = {arm: _score(one).mean for arm, one in arms.items() if one.results}
        if not ends:
            continue
        lines += ["", f"### {variant.title}", "", _row(header), "|---" * len(header) + "|"]
        for arm in sorted(ends, key=lambda arm: -ends[arm]):
            runs = {trace: [v for v in arms[arm].metric(trace.metric) if v] for trace in traces}
            numbers = [f"{np.mean([t.of(run) for run in runs[t]]):.3g}" if runs[t] else "–" for t in traces]
            lines.append(_row([experiment.arms[arm].title, f"{ends[arm]:.2f}", *numbers]))
    late = f"*Late*: the mean over the last {LATE:.0%} of the steps. Means over seeds."
    return [*lines, "", late] if lines else []


def _contrast(experiment: Experiment, results: Sequence[Result]) -> Experiment | None:
    """The experiment with the arms that a picture can tell apart: in the first condition that was measured the best,
    the worst, and the worst one's twins with smaller steps. None before there are two."""
    for condition in experiment.conditions:
        arms = {arm: Arm.of(results, condition, arm) for arm in experiment.arms}
        ends = {arm: _score(one).mean for arm, one in arms.items() if one.results}
        if len(ends) > 1:
            worst, best = min(ends, key=lambda arm: ends[arm]), max(ends, key=lambda arm: ends[arm])
            shown = {arm: one for arm, one in experiment.arms.items() if arm == best or _base(arm) == _base(worst)}
            measured = {key: one for key, one in experiment.conditions.items() if _has(results, key)}
            return experiment.model_copy(update=dict(arms=shown, conditions=measured))
    return None


def _has(results: Sequence[Result], condition: str) -> bool:
    return any(one.condition == condition for one in results)


def _best(found: Mapping[str, Mapping[Place, Score]], cells: Mapping[Place, str]) -> dict[Place, float]:
    return {cell: max((row[cell].mean for row in found.values() if cell in row), default=0.0) for cell in cells}


def _titles(matrix: Matrix) -> dict[str, str]:
    """Those of the first experiment that has an arm."""
    return {arm: one.title for e in reversed(matrix.experiments.values()) for arm, one in e.arms.items()}


def _cells(matrix: Matrix) -> dict[Place, str]:
    return {(name, key): one.title for name, e in matrix.experiments.items() for key, one in e.conditions.items()}


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
