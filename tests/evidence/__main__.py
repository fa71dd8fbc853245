"""`python -m tests.evidence [WHAT]`: measure a declared matrix with the real stack, then write or print what it shows.

    claims      matrix.yaml      the papers' claims, judged by stated rules: docs/evidence/claims.md
    robust      robust.yaml      which objective never collapses: docs/evidence/robust.md
    schedules   schedules.yaml   samples and seconds to a held-out pass@1 under sync, async and staged: a table
    precision   precision.yaml   the same training in several precisions: a table

Killed and started again it goes on where it was: each cell is a run directory, and what was measured is kept in
docs/evidence/*.json. `--quick` asks less of fewer seeds and steps and writes beside the runs, not over docs/.
`--page` runs nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import EvenKeelError
from tests.evidence import precision, robust, schedules
from tests.evidence.matrix import REPOSITORY, Matrix, cells_of, read_matrix
from tests.evidence.page import write_page
from tests.evidence.results import SETTLED, State, keep, load, unmeasured
from tests.evidence.runner import check_unchanged, run_cells, say

WHAT = ("claims", "robust", "schedules", "precision")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when a cell failed otherwise than by diverging."""
    options = _parse(arguments)
    root = options.root or REPOSITORY / "runs" / (f"{options.what}-quick" if options.quick else options.what)
    kept = root if options.quick else REPOSITORY / "docs" / "evidence"
    # The page of claims says of every cell how far it came.
    states: tuple[State, ...] = ("unfinished", "finished", "diverged", "failed")
    states = states if options.what == "claims" else SETTLED
    file = "matrix" if options.what == "claims" else options.what
    failed = False
    try:
        matrix = read_matrix(Path(__file__).with_name(f"{file}.yaml"), quick=options.quick)
        for name, experiment in matrix.experiments.items():
            cells, path = list(cells_of(matrix, name, root)), kept / f"{_stem(options.what, name)}.json"
            wanted = [one for one in cells if options.only in one.name and one.seed <= options.seeds]
            if options.what != "claims":
                wanted = unmeasured(path, wanted)
            if options.clock:
                schedules.take_clocks(matrix, cells, options.clock, once=options.one)
            elif not options.page:
                check_unchanged(cells if options.what == "claims" else wanted)
                failed = run_cells(matrix, experiment, wanted, options.jobs) or failed
            keep(path, cells, experiment.series, states)
        _show(options.what, matrix, kept, quick=options.quick)
    except EvenKeelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(failed)


def _stem(what: str, experiment: str) -> str:
    return f"robust-{experiment}" if what == "robust" else experiment


def _show(what: str, matrix: Matrix, kept: Path, *, quick: bool) -> None:
    results = {name: load(kept / f"{_stem(what, name)}.json") for name in matrix.experiments}
    if what in ("claims", "robust"):
        path = kept / f"{what}.md"
        if what == "claims":
            write_page(matrix, results, path, quick=quick)
        else:
            robust.write_page(matrix, results, path)
        say(f"wrote {path}")
        return
    table = schedules.table if what == "schedules" else precision.table
    for name, experiment in matrix.experiments.items():
        print(table(experiment, results[name]))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=WHAT, default="claims")
    parser.add_argument("--quick", action="store_true", help="of claims: at most 20 minutes on two cores")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cells whose name has this in it")
    parser.add_argument("--seeds", type=int, default=99, metavar="N", help="seeds up to N (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="cells beside one another, one core each (default 2)")
    parser.add_argument("--root", type=Path, help="where run directories live (default runs/WHAT)")
    parser.add_argument("--clock", type=int, default=0, metavar="N", help="of schedules: time each arm N times instead")
    parser.add_argument("--one", action="store_true", help="with --clock: one run, of the arm that has fewest")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
