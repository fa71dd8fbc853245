"""Carry how full the engines are from the fleet, which looks, to the collector, which decides how much to ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """What an engine has to do, by its own count."""

    running: int
    """Requests whose keys and values it holds."""
    waiting: int
    """Requests in its queue."""
    live_tokens: int
    """Tokens whose keys and values its requests hold; what is merely cached does not count."""
    kv_tokens: int
    """Tokens whose keys and values it has room for."""
    kv_use: float
    """Share of the room that is taken by live tokens, of its fullest part."""


class InFlight(Protocol):
    """The prompts under way, as the fleet sees them."""

    @property
    def is_overdrawn(self) -> bool:
        """Whether more prompts are under way than the admitted engines should have: a prompt that lost its engine
        waits for another one's turn instead of crowding the rest."""
        ...

    def observe(self, loads: Sequence[EngineLoad | None]) -> None:
        """Take note of the load of each admitted engine; None where an engine does not tell. Called about once a
        second, and whenever an engine is admitted or quarantined."""
        ...
