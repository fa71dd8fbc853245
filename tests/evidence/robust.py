"""`python -m tests.evidence.robust`: which objective never collapses? The cells of robust.yaml, and docs/robust.md.

    robust.yaml ──cells not settled yet──▶ evenkeel train ──harvest──▶ docs/evidence/robust-*.json ──▶ docs/robust.md

An arm that is another one without lag is not run in the fresh cells: the other one's runs stand there (`stand_in`).
`--seeds 1` is the screen; without it all declared seeds run. Killed and started again it goes on where it was; `--only`
takes cells whose name has a text in it, `--page` runs nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.data.files import write_atomically
from pipeline.errors import EvenKeelError
from tests.evidence.matrix import REPOSITORY, Cell, Matrix, cells_of, read_matrix
from tests.evidence.results import Arm, Result, harvest, load, save
from tests.evidence.runner import check_unchanged, is_settled, run_cells
from tests.evidence.statistics import ALPHA, Spread, visible_difference

KEPT = REPOSITORY / "docs" / "evidence"
PAGE = REPOSITORY / "docs" / "robust.md"
BAR = 0.8
"""An arm passes that ends at this share of the best arm, or more, in every cell."""
FRESH = "fresh"
"""The experiment without lag."""

Results = Mapping[str, Sequence[Result]]
"""By experiment."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when a cell failed otherwise than by diverging."""
    options = _parse(arguments)
    try:
        matrix = read_matrix(Path(__file__).with_suffix(".yaml"))
        cells = {name: list(cells_of(matrix, name, options.root)) for name in matrix.experiments}
        failed = False
        for name, experiment in matrix.experiments.items():
            wanted = [one for one in cells[name] if options.only in one.name and one.seed <= options.seeds]
            if not options.page and wanted:
                check_unchanged(wanted)
                failed = run_cells(matrix, experiment, wanted, options.jobs) or failed
            _keep(KEPT / f"robust-{name}.json", cells[name], experiment.series)
        results = {name: load(KEPT / f"robust-{name}.json") for name in matrix.experiments}
        write_atomically(PAGE, page(matrix, results))
    except EvenKeelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(failed)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.evidence.robust", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--seeds", type=int, default=99, help="the first so many (1: the screen; default: all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cells whose name has this in it")
    parser.add_argument("--jobs", type=int, default=2, help="cells beside one another, one core each (default 2)")
    parser.add_argument("--root", type=Path, default=REPOSITORY / "runs" / "robust", help="where run directories live")
    return parser.parse_args(arguments)


def _keep(path: Path, cells: Sequence[Cell], series: Sequence[str]) -> None:
    """Harvest what has settled; a cell without a run directory keeps what was harvested before."""
    known = {(one.condition, one.arm, one.seed): one for one in load(path)}
    found = {
        (cell.condition, cell.arm, cell.seed): harvest(cell, series) if is_settled(cell) else None for cell in cells
    }
    merged = [found[key] or known.get(key) for key in found]
    if kept := [one for one in merged if one is not None]:
        save(path, kept)


def stand_in(arm: str) -> str:
    """The arm that `arm` is where nothing is stale: age 0 leaves the learning rate, lr / √(1 + 0) is lr, and where
    pi_old is pi both split and decoupled PPO are CISPO."""
    base = arm.removesuffix("_age").removesuffix("_const").removesuffix("_ess")
    return "cispo" if base in ("split", "decoupled") else base


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


def scores(matrix: Matrix, results: Results) -> dict[str, dict[tuple[str, str], Score]]:
    """Arm → (experiment, condition) → its score, where it has one."""
    arms = list(dict.fromkeys(arm for experiment in matrix.experiments.values() for arm in experiment.arms))
    found: dict[str, dict[tuple[str, str], Score]] = {arm: {} for arm in arms}
    for name, experiment in matrix.experiments.items():
        for condition in experiment.conditions:
            for arm in arms:
                run = arm if arm in experiment.arms else stand_in(arm)
                if run != arm and name != FRESH:
                    continue
                measured = Arm.of(results.get(name, []), condition, run)
                if measured.results:
                    found[arm][name, condition] = Score(measured.curve()[:, -1].mean(axis=1).tolist())
    return found


def page(matrix: Matrix, results: Results) -> str:
    """docs/robust.md: the answer, then the table of cells and arms, then what it could have shown."""
    found, cells = scores(matrix, results), _cells(matrix)
    best = {cell: max((row[cell].mean for row in found.values() if cell in row), default=0.0) for cell in cells}
    titles = {arm: one.title for e in reversed(matrix.experiments.values()) for arm, one in e.arms.items()}
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
    for name, experiment in matrix.experiments.items():
        lines += ["", f"## {experiment.title}", "", experiment.text, "", _power(matrix, name, results.get(name, []))]
    return "\n".join(lines).rstrip() + "\n"


def _answer(
    found: Mapping[str, Mapping[tuple[str, str], Score]], best: Mapping[tuple[str, str], float], titles: dict[str, str]
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


def _ratio(row: Mapping[tuple[str, str], Score], best: Mapping[tuple[str, str], float]) -> float:
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
    visible = visible_difference(float(spread.sd), runs, spread.df, ALPHA)
    return (
        f"Run-to-run standard deviation {float(spread.sd):.3f} ({spread.df} degrees of freedom). With {runs} seeds a "
        f"true difference of {visible:.2f} between two arms would be seen four times in five, one comparison at a time."
    )


def _cells(matrix: Matrix) -> dict[tuple[str, str], str]:
    return {(name, key): one.title for name, e in matrix.experiments.items() for key, one in e.conditions.items()}


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
