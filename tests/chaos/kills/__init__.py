"""The kill matrix: every process of a real run is killed, stopped or robbed of its disk at every point that matters.

Process × point × schedule × channel (tests.chaos.kills.plan); after each run: nothing lost, nothing twice, nothing
stale, every step recorded, the replay bit-identical, nothing left behind (tests.chaos.kills.driver).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.ledger import OK, Case

if TYPE_CHECKING:
    from tests.chaos.kills.plan import Plan

RUNS = Path("runs/chaos/kills")
"""Folders of cases that are under way or went wrong."""


@dataclass
class Kills:
    """One run and all that happens to it."""

    plan: Plan
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.plan.id

    def run(self) -> str:
        from tests.chaos.kills.plan import make_model_of
        from tests.chaos.kills.zygote import ask

        folder = (RUNS / self.id).absolute()
        shutil.rmtree(folder, ignore_errors=True)
        model = make_model_of(self.plan, RUNS.absolute())
        found = ask(self.plan, folder, model)
        self.details = {"commit": commit(), **found["details"]}
        verdict: str = found["verdict"]
        if verdict == OK:
            shutil.rmtree(folder)
        return verdict


def commit() -> str:
    """Of the code that was tried."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip()


def cases() -> Sequence[Case]:
    """All runs."""
    from tests.chaos.kills.plan import plans

    return [Kills(plan) for plan in plans()]
