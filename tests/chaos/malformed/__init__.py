"""Malformed input: a try ends within its deadline, by one line that says what is wrong, or harmlessly.

A kind is a module of this folder: `attempt(seed, folder)` → "ok" or what is wrong, one try drawn from its seed alone;
`prepare()`; COUNT of its tries, of which the first IN_MAKE_TEST are run every day. tests.chaos.malformed.tries runs
them in a process of its own, with a deadline and a bound on memory. Never a traceback, never past a deadline, and
nothing in the ledger of a run. A case is a block of tries.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from tests.chaos.ledger import OK, Case, Check

KINDS = ("recipes", "checkpoints", "answers", "batches")
BLOCK = 50
"""Tries of a case."""


def cases() -> Sequence[Case]:
    """Blocks of all kinds, one block of each in turn: a part of them is a part of each kind."""
    blocks = [(start, name) for name in KINDS for start in range(0, kind(name).COUNT, BLOCK)]
    blocks.sort(key=lambda block: (block[0], KINDS.index(block[1])))
    return [Check(f"{name}-{start:05d}", partial(_block, name, start)) for start, name in blocks]


def kind(name: str) -> Any:
    """Its module."""
    return importlib.import_module(f"tests.chaos.malformed.{name}")


def _block(name: str, start: int, details: dict[str, Any]) -> str:
    from tests.chaos.malformed.tries import run_tries

    seeds = range(start, min(start + BLOCK, kind(name).COUNT))
    wrong = {seed: verdict for seed, verdict in run_tries(name, seeds).items() if verdict != OK}
    details.update(tries=len(seeds), wrong={str(seed): verdict for seed, verdict in wrong.items()})
    shown = "; ".join(f"seed {seed}: {verdict}" for seed, verdict in list(wrong.items())[:3])
    return f"{len(wrong)} of {len(seeds)}: {shown}" if wrong else OK
