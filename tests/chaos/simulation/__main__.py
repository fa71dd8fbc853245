"""`python -m tests.chaos.simulation --seed N`: one seed again, with its trace; `--cases N`: many."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from dataclasses import fields, replace

from tests.chaos.simulation.plan import Plan, plan_of
from tests.chaos.simulation.simulate import simulate


def shrunk(plan: Plan) -> Plan:
    """With as few faults and as little else as still fails, in some way."""
    plain = Plan(seed=plan.seed)
    changed = True
    while changed:
        changed = False
        smaller = [
            *(replace(plan, faults=(*plan.faults[:i], *plan.faults[i + 1 :])) for i in range(len(plan.faults))),
            *(replace(plan, **{field.name: getattr(plain, field.name)}) for field in fields(Plan)[1:-1]),
        ]
        for candidate in smaller:
            if candidate != plan and simulate(candidate).verdict != "ok":
                plan, changed = candidate, True
                break
    return plan


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.simulation", description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last-lines", type=int, default=0, help="of the trace; 0: all")
    parser.add_argument("--shrink", action="store_true", help="also print a smaller plan that fails")
    options = parser.parse_args()
    if options.seed is not None:
        result = simulate(plan_of(options.seed), traced=True)
        print("\n".join(result.trace[-options.last_lines :]))
        if options.shrink and result.verdict != "ok":
            print(repr(shrunk(plan_of(options.seed))))
        print(plan_of(options.seed), result.verdict, result.digest, f"{result.points} points", sep="\n")
        return int(result.verdict != "ok")
    started, bad, happened, points, virtual = time.monotonic(), 0, Counter[str](), 0, 0.0
    for seed in range(options.first, options.first + options.cases):
        result = simulate(plan_of(seed))
        happened.update(result.happened)
        points += result.points
        virtual += result.seconds
        if result.verdict != "ok":
            bad += 1
            print(f"seed {seed}: {result.verdict[:600]}", flush=True)
    seconds = time.monotonic() - started
    print(
        f"{options.cases} simulations, {bad} not ok, {seconds:.1f} s ({options.cases / seconds:.1f} a second), "
        f"{points} operations, {virtual / 3600:.1f} virtual hours; {dict(happened)}"
    )
    return int(bad > 0)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets would differ from one process to the next
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.chaos.simulation", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    sys.exit(main())
