"""What the figures of mismatch draw: buckets over several steps, and nothing without data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.analysis.figures.mismatch import LAST_STEPS, buckets, mismatch_figures
from pipeline.analysis.run_log import RunLog

WriteRun = Callable[..., Path]


def test_buckets_are_means_over_the_tokens_of_the_last_steps(write_run: WriteRun) -> None:
    def line(step: int, tokens: int, fresh: float, gap: float) -> dict[str, object]:
        cell = dict(share=fresh, ess=1 - gap, log_ratio_abs_mean=gap, log_ratio_mean=-gap)
        ages = {"0": cell} | ({"1": cell | dict(share=1 - fresh)} if fresh < 1 else {})
        return dict(step=step, num_tokens=tokens, mismatch={"age": ages})

    lines = [line(0, 10**9, 1.0, 0.9), *(line(step, 100, 1.0, 0.1) for step in range(1, LAST_STEPS))]
    run_log = replace(RunLog.read(write_run(1)), metrics=[*lines, line(LAST_STEPS, 300, 0.5, 0.3)])
    fresh, old = buckets(run_log)
    assert (fresh.split.name, fresh.name, old.name) == ("age", "0", "1")
    tokens = 100 * (LAST_STEPS - 1)
    assert fresh.share == pytest.approx((tokens + 150) / (tokens + 300))
    assert fresh.abs_gap == pytest.approx((0.1 * tokens + 0.3 * 150) / (tokens + 150))
    assert fresh.gap == -fresh.abs_gap
    assert old.abs_gap == 0.3


def test_a_run_without_these_numbers_has_no_such_figures(write_run: WriteRun) -> None:
    run_log = RunLog.read(write_run(3))
    old = {"step", "time", "num_tokens", "seconds"}
    plain = [{key: value for key, value in line.items() if key in old} for line in run_log.metrics]
    assert {svg for _, svg in mismatch_figures(replace(run_log, metrics=plain))} == {None}


def test_a_series_reads_into_nested_metrics(write_run: WriteRun) -> None:
    run_log = RunLog.read(write_run(3))
    assert run_log.series("mismatch/age/0/share") == ([0, 1, 2], [0.75] * 3)
    assert run_log.series("mismatch/age/99/share") == ([], [])
    assert run_log.series("ess/age/0") == ([], [])
