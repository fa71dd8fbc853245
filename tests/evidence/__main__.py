"""`python -m tests.evidence`: measure the declared matrix with the real stack, then write the page.

Killed and started again it goes on where it was: each cell is a run directory. `--quick` asks fewer questions of fewer
seeds and steps and writes beside them, not over docs/. `--page` only writes the page, from what has been measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import EvenKeelError
from tests.evidence.matrix import REPOSITORY, cells_of, read_matrix
from tests.evidence.page import write_page
from tests.evidence.results import State, keep
from tests.evidence.runner import check_unchanged, run_cells, say

HERE = Path(__file__).parent
STARTED: tuple[State, ...] = ("unfinished", "finished", "diverged", "failed")
"""The page says of every cell how far it came."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when a cell failed otherwise than by diverging."""
    options = _parse(arguments)
    root = options.root or REPOSITORY / "runs" / ("evidence-quick" if options.quick else "evidence")
    page = (root if options.quick else REPOSITORY / "docs" / "evidence") / "claims.md"
    try:
        matrix = read_matrix(options.matrix, quick=options.quick)
        cells = {name: list(cells_of(matrix, name, root)) for name in matrix.experiments}
        wanted = {name: [cell for cell in found if options.only in cell.name] for name, found in cells.items()}
        failed = False
        if not options.page:
            check_unchanged([cell for found in cells.values() for cell in found])
            failed = any(
                [run_cells(matrix, matrix.experiments[name], found, options.jobs) for name, found in wanted.items()]
            )
        for name, experiment in matrix.experiments.items():
            keep(page.parent / f"{name}.json", cells[name], experiment.series, STARTED)
        write_page(matrix, page, quick=options.quick)
    except EvenKeelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say(f"wrote {page}")
    return int(failed)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.evidence", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="at most 20 minutes on two cores")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cells whose name has this in it")
    parser.add_argument("--jobs", type=int, default=2, help="cells beside one another, one core each (default 2)")
    parser.add_argument("--root", type=Path, help="where run directories live (default runs/evidence)")
    parser.add_argument("--matrix", type=Path, default=HERE / "matrix.yaml")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
