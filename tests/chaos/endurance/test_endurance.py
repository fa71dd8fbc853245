"""Endurance in short: sixty steps, each ending; and the statistics that judge a thousand (`make chaos` runs those)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chaos.endurance import ENDINGS
from tests.chaos.endurance.endings import end_so
from tests.chaos.endurance.long_run import stay_flat
from tests.chaos.endurance.slopes import BOUNDS, HORIZON, SHORT_HORIZON, slope

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


def test_growth_that_cannot_matter_is_allowed() -> None:
    allowed = BOUNDS["rss_kib"] / HORIZON
    constant = slope("rank.threads", STEPS, np.full(len(STEPS), 7.0))
    assert (constant.low, constant.high, constant.is_flat, constant.is_certain) == (0, 0, True, True)
    small = slope("rank.rss_kib", STEPS, measured(allowed / 4, 1))
    assert small.low > 0
    assert small.is_flat
    assert small.is_certain


def test_the_interval_holds_the_slope_about_as_often_as_it_says() -> None:
    """Neighbours depend on one another: an interval from single measurements would miss it far more often."""
    held = [
        found.low <= 3 <= found.high
        for seed in range(200)
        if (found := slope("a.threads", STEPS, measured(3, 5, seed)))
    ]
    assert 0.85 <= np.mean(held) <= 1.0


def test_the_beginning_is_left_out() -> None:
    values = np.where(STEPS < 200, 10.0 * STEPS, 2000.0)
    assert slope("rank.descriptors", STEPS, values).a_step == pytest.approx(0.0, abs=1e-9)


def test_what_is_open_for_a_moment_is_no_leak_and_one_a_step_is() -> None:
    steps = np.arange(0, 60, 2)
    moment = np.where(np.isin(steps, (44, 52, 58)), 4.0, 3.0)
    assert slope("a.descriptors", steps, moment).is_certain
    assert not slope("a.descriptors", steps, moment + steps // 6).is_flat


def test_in_a_short_run_a_pool_may_fill_and_one_lost_a_step_stands_out() -> None:
    steps = np.arange(0, 60, 2)
    pool = np.where(steps < 30, 13.0, np.where(steps < 46, 14.0, 15.0))
    assert not slope("router.descriptors", steps, pool).is_flat
    assert slope("router.descriptors", steps, pool, SHORT_HORIZON).is_flat
    assert not slope("router.descriptors", steps, 13.0 + steps, SHORT_HORIZON).is_flat


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="2 measurements after the warm-up"):
        slope("rank.threads", [0, 1, 2], [1, 1, 1])


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
