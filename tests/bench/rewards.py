"""CPU time and clock time of a trivial reward: called by its worker, or in one more process, confined or not.

The function is `exact_match` each time. By its own name it is built in, so the worker calls it. By the name that it has
here it counts as foreign code, which runs in a process of its own behind the worker. All kinds take turns, with one
worker each; medians of the rounds. Compare ratios within one run only.

    cpu_ms     of all processes together, for each sample
    clock_ms   until the last verdict, for each sample
    cpu, clock as ratios to the built-in one
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence

import psutil
from rich.console import Console
from rich.table import Table

from pipeline.rewards.pool import Verifiers
from pipeline.rewards.sandbox.choice import RUNGS, what_is_wrong_with
from pipeline.rewards.sandbox.confine import landlock_version
from pipeline.rewards.verifiers import exact_match as foreign
from pipeline.rewards.worker_process import Sandbox

BUILT_IN, FOREIGN = "pipeline.rewards.verifiers:exact_match", "tests.bench.rewards:foreign"
"""One function, by the name that a worker trusts and by one that it does not."""
assert foreign.__name__ == "exact_match"


def measure(rounds: int, samples: int) -> dict[str, dict[str, float]]:
    """Kind of worker → its numbers."""
    pools = {
        "built in": Verifiers(BUILT_IN, 1, 60.0, sandbox=None),
        "foreign": Verifiers(FOREIGN, 1, 60.0, sandbox=None),
    }
    for rung in RUNGS:
        if what_is_wrong_with(rung) is None:
            sandbox = Sandbox(rung=rung, landlock_abi=landlock_version())
            pools[f"foreign, {rung}"] = Verifiers(FOREIGN, 1, 60.0, sandbox=sandbox)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in pools}
    for _ in range(rounds + 1):  # the first round is left out
        for name, pool in pools.items():
            taken[name].append(asyncio.run(score(pool, samples)))
    for pool in pools.values():
        pool.close()
    return case(
        {name: [statistics.median(column) for column in zip(*pairs[1:], strict=True)] for name, pairs in taken.items()}
    )


async def score(pool: Verifiers, samples: int) -> tuple[float, float]:
    """Milliseconds of CPU and of the clock for each sample."""
    cpu, clock = cpu_s(), time.monotonic()
    verdicts = await asyncio.gather(*(pool.score("prompt", "answer", "answer") for _ in range(samples)))
    assert all(verdict.reward == 1.0 for verdict in verdicts)
    return (cpu_s() - cpu) * 1000 / samples, (time.monotonic() - clock) * 1000 / samples


def cpu_s() -> float:
    """Of this process and all below it."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def case(medians: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    cpu, clock = medians["built in"]
    return {name: dict(cpu_ms=c, clock_ms=s, cpu=c / cpu, clock=s / clock) for name, (c, s) in medians.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--samples", type=int, default=2000, help="of each kind in each round")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    found = measure(given.rounds, given.samples)
    if given.json:
        print(json.dumps(found, indent=2))
        return
    table = Table("one sample", "cpu_ms", "clock_ms", "cpu", "clock")
    for name, row in found.items():
        table.add_row(name, *(f"{row[column]:.3f}" for column in ("cpu_ms", "clock_ms", "cpu", "clock")))
    Console().print(table)


if __name__ == "__main__":
    main()
