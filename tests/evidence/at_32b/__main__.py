"""`python -m tests.evidence.at_32b measure|page`: the study behind docs/precision-at-32b.md.

measure takes some hours of one core and below 3 GiB, and may be ended and started at any time: a case that is measured
is a file, and the true shapes go on from their last layer. page writes the document from those files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

RESULTS = Path("runs/precision-at-32b")
STUDIES = ("depth", "width", "ends", "length", "shapes")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.evidence.at_32b", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure", help="run the cases that have no results yet")
    measure.add_argument("--study", action="append", choices=STUDIES, help="only these; repeat at will")
    measure.add_argument("--out", type=Path, default=RESULTS)
    page = commands.add_parser("page", help="write docs/precision-at-32b.md and its plots")
    page.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.command == "measure":
        from tests.evidence.at_32b import cases

        cases.measure(arguments.out, arguments.study or STUDIES)
    else:
        from tests.evidence.at_32b import page as written

        written.write(arguments.results)


if __name__ == "__main__":
    main()
