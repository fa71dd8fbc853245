"""Endurance: a long run whose processes neither grow nor hoard, and endings that leave nothing behind.

steps-1000         memory, descriptors, threads, shared memory and files of every process, against the step
ending-KIND        finished, Ctrl-C, SIGTERM, kill -9 of the supervisor, an error: processes and files afterwards
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.chaos.ledger import Case, Check

FOLDER = Path("runs/chaos/endurance")
STEPS = 1000
ENDINGS = ("finished", "ctrl-c", "sigterm", "kill-9", "error")


def cases() -> Sequence[Case]:
    """The endings first: they take a minute each."""
    from tests.chaos.endurance.endings import end_so
    from tests.chaos.endurance.long_run import stay_flat

    def ending(kind: str) -> Case:
        return Check(f"ending-{kind}", lambda details: end_so(kind, FOLDER / f"ending-{kind}", details))

    long = Check(f"steps-{STEPS}", lambda details: stay_flat(STEPS, FOLDER / f"steps-{STEPS}", details))
    return [*map(ending, ENDINGS), long]
