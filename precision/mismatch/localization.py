"""Which known fault explains a term that should be near zero? Each suspect is tried by its effect on every token.

A fault of the engine, such as one module with a wrong scale, moves every token's log-probability in its own way. The
learner can compute that way: it scores the same tokens with the fault made in its own weights. A term that the fault
has caused is then, to first order, a multiple of that effect:

    term_t ≈ c · effect_t,   c = <term, effect> / <effect, effect>,   explained = c <term, effect> / <term, term>

`explained` is the share of the term's sum of squares that the suspect alone accounts for, in [0, 1]. Only the direction
of the effect counts, not its size: a scale that is wrong by any small factor is found by the effect of 1.1. A negative
c is the opposite of the fault. It explains nothing, unless the fault can be that way, too: a scale may be too small, as
long as it is a scale (`least`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from precision.torch_on_use import Tensor

TRIED_SCALE = 1.1
"""The wrong scale that is tried: small enough that another factor has nearly the same effect, times a number."""
LEAST_SCALE = -1.0 / (TRIED_SCALE - 1.0)
"""The amount of it at which the scale is 0."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A fault, and how well it alone explains a term."""

    name: str
    explained: float
    """Share of the term's sum of squares, in [0, 1]."""
    amount: float
    """How many times the fault that was tried."""


def suspects(
    term: Tensor, effects: Mapping[str, Tensor], least: Mapping[str, float] = MappingProxyType({})
) -> list[Suspect]:
    """All suspects, the best first; `term` and each effect are float64 [tokens], nats. `least`: the amount that a fault
    exceeds, where that is not 0.

    An effect of no size explains nothing, and nothing explains a term of no size. Raises ValueError for other shapes.
    """
    power = float(term.square().sum())
    found = []
    for name, effect in effects.items():
        if effect.shape != term.shape:
            raise ValueError(
                f"the effect of {name} has shape {tuple(effect.shape)}, the term {tuple(term.shape)}; score the same "
                "tokens"
            )
        size, overlap = float(effect.square().sum()), float((term * effect).sum())
        known = size > 0 and power > 0
        amount = overlap / size if known else 0.0
        possible = known and amount > least.get(name, 0.0)
        found.append(Suspect(name=name, explained=amount * overlap / power if possible else 0.0, amount=amount))
    return sorted(found, key=lambda suspect: -suspect.explained)
