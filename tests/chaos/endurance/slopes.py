"""Whether a series of measurements grows: its slope against the step, with an interval, and what it would come to.

Neighbouring measurements of one process depend on one another (memory grows in jumps and stays), so the line is fitted
through blocks of them. A block of memory is its mean. A block of what is counted is its least: a file that is open at
the moment of measuring adds one, and what is never given back raises the least as well. The beginning is left out:
caches fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

BLOCKS = 20
FEWEST_A_BLOCK = 4
WARM_UP = 0.3
"""Share of the steps that is left out."""
CONFIDENCE = 0.95
HORIZON = 100_000
"""Steps of a long training."""
SHORT_HORIZON = 500
"""What a run of some tens of steps is judged by. A pool of connections that fills by one or two looks like growth in so
few steps, by chance even beyond doubt; what is lost in every step still stands out."""
BOUNDS = {
    "rss_kib": 1 << 20,
    "anon_kib": 1 << 20,
    "descriptors": 100.0,
    "threads": 50.0,
    "shm_kib": 1 << 18,
    "shm_files": 200.0,
    "tmp_files": 200.0,
    "temporaries": 100.0,
}
"""What a series may grow by over the horizon, by the last word of its name: 1 GiB of memory a process, 256 MiB of
shared memory, a tenth of the 1,024 descriptors that a process usually may have."""


COUNTED = ("descriptors", "threads", "shm_files", "tmp_files", "temporaries")


@dataclass(frozen=True)
class Slope:
    """Growth a step, and its interval."""

    series: str
    a_step: float
    low: float
    high: float
    first: float
    last: float
    """The first and the last block."""
    horizon: int
    """Steps over which growth up to BOUNDS is allowed."""

    @property
    def bound(self) -> float:
        """Growth a step that is too little to matter."""
        return BOUNDS[self.series.rpartition(".")[2]] / self.horizon

    @property
    def is_flat(self) -> bool:
        """Not shown to grow, or shown to grow by less than the bound."""
        return self.low <= 0.0 or self.high < self.bound

    @property
    def is_certain(self) -> bool:
        """Whether growth beyond the bound is ruled out. Where not, the run was too short to tell."""
        return self.high < self.bound

    def __str__(self) -> str:
        return (
            f"{self.series}: {self.first:.0f} → {self.last:.0f}, {1000 * self.a_step:+.2f} in 1,000 steps "
            f"({1000 * self.low:+.2f} to {1000 * self.high:+.2f}; allowed {1000 * self.bound:.2f})"
        )


def slope(series: str, steps: Sequence[float], values: Sequence[float], horizon: int = HORIZON) -> Slope:
    """Of one series, by its measurements at some steps. Raises ValueError with fewer than three after the warm-up."""
    x, y = np.asarray(steps, float), np.asarray(values, float)
    late = x >= x.min() + WARM_UP * (x.max() - x.min())
    x, y = x[late], y[late]
    if len(x) < 3:
        raise ValueError(f"{series}: {len(x)} measurements after the warm-up, expected at least 3")
    blocks = np.array_split(np.arange(len(x)), max(3, min(BLOCKS, len(x) // FEWEST_A_BLOCK)))
    of_block = np.min if series.rpartition(".")[2] in COUNTED else np.mean
    x = np.asarray([x[part].mean() for part in blocks])
    y = np.asarray([of_block(y[part]) for part in blocks])
    if np.ptp(y) == 0:
        return Slope(series, 0.0, 0.0, 0.0, float(y[0]), float(y[-1]), horizon)
    line = stats.linregress(x, y)
    reach = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(x) - 2)) * line.stderr
    a_step = float(line.slope)
    return Slope(series, a_step, a_step - reach, a_step + reach, float(y[0]), float(y[-1]), horizon)
