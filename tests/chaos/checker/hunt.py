"""Seeds against one broken version, in a process of its own: `python -m tests.chaos.checker.hunt FIRST LAST`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.simulation.plan import plan_of
from tests.chaos.simulation.simulate import simulate
from tests.mutations import Mutation, broken, check, copy_tree

MOST_SEEDS = 600
DEADLINE_S = 900.0


@dataclass(frozen=True)
class Caught:
    """A breakage that was found out."""

    seeds: int
    """How many were needed."""
    verdict: str
    seconds: float


def hunt(mutation: Mutation, most_seeds: int = MOST_SEEDS, first: int = 0) -> Caught | None:
    """The first seed that the broken version fails and the whole one does not; None where no seed shows it. Raises
    ValueError for a breakage that does not fit the product any more."""
    check([mutation])
    started, next_seed = time.monotonic(), first
    with tempfile.TemporaryDirectory(prefix="evenkeel-checker-") as scratch:
        tree = Path(scratch)
        copy_tree(tree)
        with broken(tree, mutation):
            while next_seed < first + most_seeds:
                found = _first_bad(tree, next_seed, first + most_seeds)
                if found is None:
                    return None
                seed, verdict = found
                next_seed = seed + 1
                if not problems(seed):
                    return Caught(next_seed - first, verdict, round(time.monotonic() - started, 1))
    return None


def _first_bad(tree: Path, first: int, end: int) -> tuple[int, str] | None:
    done = subprocess.run(
        [sys.executable, "-B", "-m", "tests.chaos.checker.hunt", str(first), str(end)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the hunt could not run: {done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return None if answer is None else (answer["seed"], answer["verdict"])


def problems(seed: int) -> list[str]:
    """What a seed shows that counts here."""
    return list(simulate(plan_of(seed, harsh=True)).problems)


def main(first: int, end: int) -> int:
    """Print the first seed that is not ok as JSON, or null."""
    for seed in range(first, end):
        if found := problems(seed):
            print(json.dumps(dict(seed=seed, verdict="; ".join(found))))
            return 1
    print("null")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
