"""Flips one bit of one file of a real run, and asks the product's readers: none may go on as if nothing had happened.

    runs/chaos/flips/runs/flips   a small real run, made once: staged, FP8 rollouts, evaluations, a model; and what such
                                  a run has not: control records, numbered quant maps, old log-probabilities, members.
                                  One bit of a copy is flipped at a time, and put back

A flip passes when a reader names the file (or its folder) in an EvenKeelError. Everything else is silent damage. What
is left out of KINDS is for people: nothing goes by it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.chaos.flips.flip import flips
from tests.chaos.ledger import Case

FLIPS = 1500


def cases() -> Sequence[Case]:
    """All flips, in an order that mixes the kinds of files."""
    return flips(FLIPS)
