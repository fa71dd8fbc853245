"""How a report draws what an objective, a correction or an advantage measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """One figure over the steps of a run. It is drawn where the run has one of its metrics."""

    title: str
    lines: tuple[tuple[str, str, str], ...]
    """(metric, label, color); colors are the names of `pipeline.analysis.figures.drawing.COLORS`."""
    percent: bool = False
    """Whether the metrics are shares, of 1."""
    log: bool = False
    """Whether the axis is logarithmic."""
    floor: float | None = None
    """Where the axis begins; None: where the data do."""


CLIPPED_TOKENS = Measure(
    "Clipped tokens",
    (
        ("clip_hits_high", "A > 0", "blue"),
        ("clip_hits_low", "A < 0", "orange"),
        ("dual_clip_hits", "A < 0, dual clip", "pink"),
    ),
    percent=True,
    floor=0.0,
)

CAPPED_TOKENS = Measure("Tokens over the cap", (("cap_hits", "tokens", "orange"),), percent=True, floor=0.0)

MEAN_WEIGHT = Measure("Mean weight", (("weight", "weight", "teal"),))
