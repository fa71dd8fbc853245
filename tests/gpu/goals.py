"""What a check wants to see, and whether it saw it. Data and arithmetic only: read on any machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Figure = float | list[object] | str
"""A number; a curve or a table; or text: a fact, or why a figure was not measured."""
Figures = dict[str, Figure]
Verdict = Literal["met", "missed", "not measured", "shown"]


class NotMeasured(Exception):  # noqa: N818 (not an error)
    """What a check lacks on this machine, as one line: the rest of it cannot be measured here."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One line of the table. Without a bound the figure is shown without a verdict."""

    figure: str
    """Its name among the check's figures."""
    what: str
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    below: float | None = None

    @property
    def wanted(self) -> str:
        """The bound as text, empty where there is none."""
        bounds = (("≤", self.at_most), ("≥", self.at_least), ("<", self.below))
        return ", ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)

    def judge(self, figures: Mapping[str, Figure]) -> tuple[Verdict, str]:
        """(verdict, why it was not measured); a number that is not finite misses every bound."""
        value = figures.get(self.figure, "the check did not get that far")
        if isinstance(value, str):
            return ("shown", "") if not self.wanted and self.figure in figures else ("not measured", value)
        if not self.wanted or isinstance(value, list):
            return "shown", ""
        missed = (  # written so that NaN misses
            (self.at_most is not None and not value <= self.at_most)
            or (self.at_least is not None and not value >= self.at_least)
            or (self.below is not None and not value < self.below)
        )
        return ("missed" if missed else "met"), ""


def ratios(figures: Mapping[str, Figure], wanted: Mapping[str, tuple[str, str]]) -> Figures:
    """name → first ÷ second, where both are numbers and the second is not 0."""
    found: Figures = {}
    for name, (above, below) in wanted.items():
        numerator, denominator = figures.get(above), figures.get(below)
        if isinstance(numerator, float) and isinstance(denominator, float) and denominator:
            found[name] = numerator / denominator
    return found
