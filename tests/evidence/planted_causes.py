"""Plant a dozen causes of mismatch in real engines, one after another, and print what is named of each.

    python -m tests.evidence.planted_causes --model MODEL --other ANOTHER_VERSION [--only WORDS] [--out FOLDER]

Causes that have a result in FOLDER are not planted again. Exits 1 when one is not named, or when the terms of a token
do not add up.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.support.engine_forks import forked_engines
from tests.support.planted_causes import PLANTS, Models, Plant, is_named, measured_plant, place, said_by_scores
from tests.support.rank_programs import forked_programs

LARGEST_ERROR = 1e-6
TERMS = ("staleness", "quantization", "kernels", "decoding")


def row(plant: Plant, result: dict[str, Any]) -> list[str]:
    """Of the table: the cause, what each term is, what was named."""
    cause = result["cause"]
    places = [] if cause is None else cause["where"]
    named = "nothing" if cause is None else f"`{cause['cause']}`"
    if places and plant.where:
        named += f": {place(plant, result) or places[0]}" + (f" and {len(places) - 1} more" if len(places) > 1 else "")
    sizes = [f"{result['terms'][term]['mean_abs']:.2g}" for term in TERMS]
    alone = ""
    if plant.suspect and (names := said_by_scores(result)):
        share = 100 * result["suspects"]["kernels"][0]["explained"]
        alone = f"{' or '.join(f'`{name}`' for name in names)}: {share:.0f} %"
    fine = is_named(plant, result) and result["largest_error"] <= LARGEST_ERROR
    ess = f"{result['total']['ess']:.4f}"
    return [plant.name, *sizes, ess, named, alone, "yes" if fine else "NO"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="HF folder that the engine should serve")
    parser.add_argument("--other", type=Path, required=True, help="HF folder of another version of it")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--only", default="", help="only causes whose name holds these words")
    parser.add_argument("--set", action="append", default=[], help="override a key of the recipe, demo")
    parser.add_argument("--out", type=Path, default=Path("runs/planted-causes"))
    options = parser.parse_args()
    models = Models(options.model.absolute(), options.other.absolute())
    header = ["planted", *TERMS, "ESS", "named first", "the scores alone say", "right"]
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header), flush=True)
    rows = []
    with forked_engines(), forked_programs():
        for number, plant in enumerate(PLANTS):
            if options.only not in plant.name:
                continue
            folder = options.out / f"{number:02d}"
            if (folder / "mismatch.json").exists():  # of an earlier call that was interrupted
                result = json.loads((folder / "mismatch.json").read_text())
            else:
                result = measured_plant(plant, models, folder, num_prompts=options.prompts, sets=options.set)
            rows.append(row(plant, result))
            print("| " + " | ".join(rows[-1]) + " |", flush=True)
    (options.out / "table.json").write_text(json.dumps(rows))
    sys.exit(0 if all(one[-1] == "yes" for one in rows) else 1)


if __name__ == "__main__":
    main()
