"""What somebody meant who wrote a word that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST = 80
"""Characters of a word that is compared: a longer one is no misspelling, and comparing takes their square."""


def near(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known words that are spelled nearly so, the nearest first."""
    return get_close_matches(word, list(known), n=most) if len(word) <= _LONGEST else []


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean grpo?` to end a message with; empty where no known word is near."""
    found = near(word, known, most=1)
    return f"; did you mean {found[0]}?" if found else ""
