"""Endurance in short: sixty steps, each ending; and the statistics that judge a thousand (`make chaos` runs those)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chaos.endurance import ENDINGS
from tests.chaos.endurance.endings import end_so
from tests.chaos.endurance.long_run import stay_flat
from tests.chaos.endurance.slopes import SHORT_HORIZON, slope

STEPS = np.arange(0, 1000, 5)


def measured(a_step: float, noise: float, seed: int = 0) -> np.ndarray:
    """A series that grows so, with noise that depends on the noise before it."""
    rng, value, found = np.random.default_rng(seed), 0.0, []
    for step in STEPS:
        value = 0.8 * value + rng.normal(0, noise)
        found.append(500_000 + a_step * step + value)
    return np.asarray(found)


def test_a_flat_series_is_flat_and_a_leak_is_none() -> None:
    assert slope("rank.rss_kib", STEPS, measured(0, 200)).is_flat
    leak = slope("rank.rss_kib", STEPS, measured(40, 200))
    assert not leak.is_flat
    assert leak.low < 40 < leak.high
    assert "rank.rss_kib: " in str(leak)


def test_in_a_short_run_a_pool_may_fill_and_one_lost_a_step_stands_out() -> None:
    steps = np.arange(0, 60, 2)
    pool = np.where(steps < 30, 13.0, np.where(steps < 46, 14.0, 15.0))
    assert not slope("router.descriptors", steps, pool).is_flat
    assert slope("router.descriptors", steps, pool, SHORT_HORIZON).is_flat
    assert not slope("router.descriptors", steps, 13.0 + steps, SHORT_HORIZON).is_flat


@pytest.mark.slow
@pytest.mark.loop
@pytest.mark.timeout(1800)
def test_sixty_steps_hoard_nothing(tmp_path: Path) -> None:
    """Too few to judge memory by; descriptors, threads and files are counted."""
    details: dict[str, Any] = {}
    counted = ("descriptors", "threads", "shm_files", "tmp_files")
    verdict = stay_flat(60, tmp_path, details, every=2, series=counted, horizon=SHORT_HORIZON)
    assert verdict == "ok", details.get("slopes")


@pytest.mark.slow
@pytest.mark.loop
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "kill-9" else [pytest.mark.repeated]) for kind in ENDINGS],
)
def test_nothing_is_left_however_a_run_ends(kind: str, tmp_path: Path) -> None:
    assert end_so(kind, tmp_path / "case", {}) == "ok"
