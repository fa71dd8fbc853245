"""`python -m tests.evidence.formats`: what the formats of rollouts cost before any training, and what is left of it
when the learner follows.

    python -m tests.evidence.formats --model runs/models/demo    # made by `make demo`
    python -m tests.evidence.formats --page                      # print what was measured

Each cell is `evenkeel mismatch demo` with a real engine and a real learner in float32: one format, the learner plain or
with `learner.fp8_emulation`, one seed of prompts. Cells that were measured are not measured again. What was found is
kept in docs/evidence/formats.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np

from launch.attribution.measure import measure
from pipeline.data.files import write_atomically
from tests.evidence.matrix import REPOSITORY
from tests.support.engine_forks import forked_engines
from tests.support.rank_programs import forked_programs

KEPT = REPOSITORY / "docs" / "evidence" / "formats.json"
TITLES = {
    "fp8_block": "FP8, 128×128 blocks",
    "fp8_tensor": "FP8, a scale a matrix",
    "emulated_fp6": "FP6 (e3m2), a scale a matrix",
    "emulated_nvfp4": "NVFP4, a scale for 16",
    "emulated_fp4": "FP4 (e2m1), a scale a matrix",
    "emulated_mxfp4": "MXFP4, a scale for 32",
}
"""In the order of their ESS."""
TERMS = ("quantization", "kernels", "decoding")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one call of `evenkeel mismatch` found: fresh rollouts of one version, so no staleness."""

    precision: str
    follows: bool
    """Whether the learner emulated the format."""
    seed: int
    tokens: int
    ess: float
    mean_abs: float
    """Mean |log-ratio| of a token, nats."""
    k3: float
    terms: dict[str, float]
    """Mean |term|, nats."""
    named: str
    """The cause that the command names first; empty: none."""

    @staticmethod
    def measured(model: Path, precision: str, follows: bool, seed: int, prompts: int) -> Cell:
        sets = [
            f"model.path={model}",
            "learner.tensor_parallel=1",
            f"rollout.precision={precision}",
            f"run.seed={seed}",
        ]
        sets.append(f"learner.fp8_emulation={str(follows).lower()}")
        folder = REPOSITORY / "runs" / "formats" / f"{precision}-{'follows' if follows else 'plain'}-{seed}"
        found = measure(Path("demo"), sets, out=folder, num_prompts=prompts, now=None, batch=None, locate=False)
        total = found["total"]
        return Cell(
            precision=precision,
            follows=follows,
            seed=seed,
            tokens=found["num_tokens"],
            ess=total["ess"],
            mean_abs=total["mean_abs"],
            k3=total["k3"],
            terms={term: found["terms"][term]["mean_abs"] for term in TERMS},
            named=found["cause"]["cause"] if found["cause"] else "",
        )


def kept() -> list[Cell]:
    """What was measured so far."""
    return [Cell(**one) for one in json.loads(KEPT.read_text())] if KEPT.exists() else []


def keep(cells: Sequence[Cell]) -> None:
    """One line a cell."""
    write_atomically(KEPT, "[\n" + ",\n".join(json.dumps(asdict(cell)) for cell in cells) + "\n]\n")


def run(options: argparse.Namespace) -> None:
    """Measure the cells that are not kept yet, keeping each as it comes."""
    cells = kept()
    done = {(cell.precision, cell.follows, cell.seed) for cell in cells}
    with forked_engines(), forked_programs():
        for seed, follows, precision in product(options.seeds, (False, True), TITLES):
            if (precision, follows, seed) not in done:
                cells.append(Cell.measured(options.model.absolute(), precision, follows, seed, options.prompts))
                keep(cells)
                print(cells[-1], flush=True)


def table(cells: Sequence[Cell]) -> str:
    """Means over the seeds, in Markdown."""
    lines = ["| rollouts | ESS | mean gap, nats | k3 | ESS, learner follows | mean gap | quantization alone |"]
    lines.append("|---|---|---|---|---|---|---|")
    for precision in TITLES:
        plain, follows = ([c for c in cells if (c.precision, c.follows) == (precision, one)] for one in (False, True))
        if plain and follows:
            gap, rest = (np.mean([cell.mean_abs for cell in some]) for some in (plain, follows))
            ess, after = (np.mean([cell.ess for cell in some]) for some in (plain, follows))
            k3 = np.mean([cell.k3 for cell in plain])
            term = np.mean([cell.terms["quantization"] for cell in plain])
            lines.append(
                f"| `{precision}` | {ess:.4f} | {gap:.2g} | {k3:.2g} | {after:.6f} | {rest:.1e} | {term:.2g} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=REPOSITORY / "runs" / "models" / "demo", help="HF folder")
    parser.add_argument("--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--prompts", type=int, default=32, help="of a cell, 8 samples each (default 32)")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.page:
        run(options)
    print(table(kept()))


if __name__ == "__main__":
    main()
