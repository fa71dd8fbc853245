"""The real collector, trainer, store and checkpoints over a virtual clock, with faults drawn from a seed.

    plan (a seed) ──▶ operator ──starts──▶ collector ─┐ turns, by virtual time ┌─▶ disk: what a power cut leaves
                         │                            ├────────────────────────┤
                         └──────starts──▶ learner ────┘                        └─▶ engines, weight updates (doubles)
                                                  the end ──▶ invariants: history, records, replay, leftovers

One seed gives one history (as FoundationDB and TigerBeetle test), whatever the machine does meanwhile:

    python -m tests.chaos simulation --minutes 0          10,000 seeds, in blocks of 25; resumable
    python -m tests.chaos.simulation 17            one seed again, with everything that happened
    python -m tests.chaos.simulation 17 --shrink     with as few faults as still fail

What is real: pipeline.rollout, pipeline.trainer, pipeline.data, the lease of weight updates. What is not: engines,
verifiers, the learner's mathematics (its weights are a hash of all that it was trained on), the writing of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.chaos.ledger import Case, Check

SEEDS, BLOCK = 10_000, 25


def cases() -> Sequence[Case]:
    """Blocks of seeds."""
    return [Check(f"seeds-{first:05d}", _block(first)) for first in range(0, SEEDS, BLOCK)]


def _block(first: int) -> Any:
    def body(details: dict[str, Any]) -> str:
        from tests.chaos.simulation.plan import plan_of
        from tests.chaos.simulation.simulate import simulate

        results = [simulate(plan_of(seed)) for seed in range(first, first + BLOCK)]
        details["operations"] = sum(result.points for result in results)
        details["virtual_s"] = round(sum(result.seconds for result in results))
        details["faults"] = sum(len(result.happened) for result in results)
        bad = {result.plan.seed: result.verdict for result in results if result.verdict != "ok"}
        details["bad"] = bad
        return "ok" if not bad else "; ".join(f"seed {seed}: {verdict[:200]}" for seed, verdict in bad.items())

    return body
