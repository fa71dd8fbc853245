"""The checker is checked: broken versions of the product go through the simulation, and each must be caught.

    a copy of this checkout ──one breakage──▶ seeds 0, 1, 2 … ──a verdict that is not ok──▶ caught
                                                    └── the same seed without the breakage must be ok ──┘

A breakage that survives shows a hole in the simulation (or that the broken line was not needed).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.chaos.ledger import Case, Check


def cases() -> Sequence[Case]:
    """One a breakage."""
    from tests.chaos.checker.breakages import BREAKAGES

    return [Check(mutation.what.replace(" ", "-"), _checked(mutation)) for mutation in BREAKAGES]


def _checked(mutation: Any) -> Any:
    def body(details: dict[str, Any]) -> str:
        from tests.chaos.checker.hunt import hunt

        caught = hunt(mutation)
        details.update(file=mutation.file)
        if caught is None:
            return "survived: no seed shows it"
        details.update(seeds=caught.seeds, by=caught.verdict, seconds=caught.seconds)
        return "ok"

    return body
