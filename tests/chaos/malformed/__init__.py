"""Malformed input: whatever is given, a try ends within its deadline, by one line that says what is wrong,
or harmlessly.

    KINDS[name].attempt(seed, folder) ──▶ "ok" or what is wrong      one try, drawn from its seed alone
    tries.run_tries(module, seeds)                                   in a process of its own,
    with a deadline and a bound

Never a traceback, never past a deadline, and nothing in the ledger of a run. A case is a block of tries.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tests.chaos.ledger import OK, Case, Check

NAMES = ("recipes", "checkpoints", "answers", "batches")
BLOCK = 50
"""Tries of a case."""


class Kind(Protocol):
    """A module of this folder."""

    COUNT: int
    """Tries of a whole part."""
    IN_MAKE_TEST: int
    """Of these, the first that every `make test` runs."""

    attempt: Callable[[int, Path], str]
    """(seed, an empty folder that is removed afterwards) → "ok" or one line."""


def cases() -> Sequence[Case]:
    """Blocks of all kinds, one block of each in turn: a part of them is a part of each kind."""
    blocks = [(name, start) for name in present() for start in range(0, kind(name).COUNT, BLOCK)]
    blocks.sort(key=lambda block: (block[1], NAMES.index(block[0])))
    return [Check(f"{name}-{start:05d}", partial(_block, name, start)) for name, start in blocks]


def present() -> list[str]:
    """The kinds that there are."""
    return [name for name in NAMES if (Path(__file__).parent / f"{name}.py").exists()]


def kind(name: str) -> Kind:
    """Its module."""
    module: Any = importlib.import_module(f"tests.chaos.malformed.{name}")
    return module  # type: ignore[no-any-return]


def _block(name: str, start: int, details: dict[str, Any]) -> str:
    from tests.chaos.malformed.tries import run_tries

    seeds = range(start, min(start + BLOCK, kind(name).COUNT))
    wrong = {seed: verdict for seed, verdict in run_tries(name, seeds).items() if verdict != OK}
    details.update(tries=len(seeds), wrong={str(seed): verdict for seed, verdict in wrong.items()})
    shown = "; ".join(f"seed {seed}: {verdict}" for seed, verdict in list(wrong.items())[:3])
    return f"{len(wrong)} of {len(seeds)}: {shown}" if wrong else OK
