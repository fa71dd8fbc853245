"""`python -m tests.evidence.robust`: which objective never collapses? The cells of robust.yaml, and docs/robust.md.

    robust.yaml ──cells not settled yet──▶ evenkeel train ──harvest──▶ docs/evidence/robust-*.json ──▶ docs/robust.md

`--seeds 1` is the screen; without it all declared seeds run. Killed and started again it goes on where it was, and a
cell whose result is kept is run nowhere again. `--only` takes cells whose name has a text in it, `--page` runs nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import EvenKeelError
from tests.evidence.matrix import REPOSITORY, cells_of, read_matrix
from tests.evidence.results import SETTLED, keep, unmeasured
from tests.evidence.robust_page import write_page
from tests.evidence.robust_table import MATRIX, load_results, results_file
from tests.evidence.runner import check_unchanged, run_cells

KEPT = REPOSITORY / "docs" / "evidence"
PAGE = REPOSITORY / "docs" / "robust.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when a cell failed otherwise than by diverging."""
    options = _parse(arguments)
    try:
        matrix = read_matrix(MATRIX)
        cells = {name: list(cells_of(matrix, name, options.root)) for name in matrix.experiments}
        failed = False
        for name, experiment in matrix.experiments.items():
            wanted = [one for one in cells[name] if options.only in one.name and one.seed <= options.seeds]
            wanted = unmeasured(results_file(KEPT, name), wanted)
            if not options.page and wanted:
                check_unchanged(wanted)
                failed = run_cells(matrix, experiment, wanted, options.jobs) or failed
            keep(results_file(KEPT, name), cells[name], experiment.series, SETTLED)
        write_page(matrix, load_results(matrix, KEPT), PAGE)
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


if __name__ == "__main__":
    sys.exit(main())
