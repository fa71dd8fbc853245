"""`python -m tests.chaos.simulation SEED`: one seed again, with its trace; `python -m tests.chaos simulation`: many."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields, replace

from tests.chaos.simulation.plan import Plan, plan_of
from tests.chaos.simulation.simulate import simulate


def shrunk(plan: Plan) -> Plan:
    """With as few faults and as little else as still fails, in some way."""
    plain = Plan(seed=plan.seed)
    while True:
        smaller = [
            *(replace(plan, faults=(*plan.faults[:i], *plan.faults[i + 1 :])) for i in range(len(plan.faults))),
            *(replace(plan, **{field.name: getattr(plain, field.name)}) for field in fields(Plan)[1:-1]),
        ]
        failing = (one for one in smaller if one != plan and simulate(one).verdict != "ok")
        if (found := next(failing, None)) is None:
            return plan
        plan = found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--shrink", action="store_true", help="also print a smaller plan that fails")
    options = parser.parse_args()
    plan = plan_of(options.seed)
    result = simulate(plan, traced=True)
    print(*result.trace, sep="\n")
    if options.shrink and result.verdict != "ok":
        print(repr(shrunk(plan)))
    print(plan, result.verdict, result.digest, f"{result.points} points", sep="\n")
    return int(result.verdict != "ok")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets would differ from one process to the next
        command = [sys.executable, "-m", "tests.chaos.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(main())
