"""One part of one check in a process of its own: `python -m tests.gpu.child MODULE PART FOLDER [--rehearse]`.

What it found lies in FOLDER/figures-PART.json; why it found nothing, in FOLDER/missing-PART.txt or its log.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from pipeline.child_process import die_with_parent
from pipeline.data.files import write_atomically
from tests.gpu.goals import NotMeasured
from tests.gpu.scale import Scale


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module")
    parser.add_argument("part")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    scale = Scale(rehearsal=options.rehearse, part=options.part, folder=options.folder)
    check = importlib.import_module(options.module)
    try:
        scale.keep(**check.run(scale))
    except NotMeasured as missing:
        write_atomically(missing_file(options.folder, options.part), str(missing))


def missing_file(folder: Path, part: str) -> Path:
    """Where a part says why it measured nothing, or no more."""
    return folder / f"missing-{part}.txt"


if __name__ == "__main__":
    die_with_parent()
    main()
