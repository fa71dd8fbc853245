"""What the depth study and the precision table make of measured numbers. No engine is started."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.evidence import depth, precision
from tests.evidence.matrix import cells_of, read_matrix
from tests.support.evidence import a_result


def test_luck_is_taken_off_both_sides() -> None:
    gap, left, luck = np.array([0.1, 0.3]), np.array([0.02, 0.04]), np.array([0.02, 0.02])
    assert depth.share(gap, left, luck) == pytest.approx((0.2 - 0.03) / (0.2 - 0.02))
    assert depth.share(gap, luck, luck) == 1.0


def test_the_interval_is_over_rows() -> None:
    """Ten tokens of a row are one observation: the interval is as wide as that of two rows."""
    owner = np.repeat([0, 1], 10)
    values = np.where(owner == 0, 0.0, 1.0)
    assert depth.bootstrap(owner, lambda chosen: float(values[chosen].mean())) == (0.0, 1.0)


def test_the_depth_table_takes_luck_off_against_decoding_only() -> None:
    view = dict(gap=0.1, emulated=0.03, engine_luck=0.02, learner_luck=0.01, explained=0.9)
    view |= dict(explained_low=0.8, explained_high=0.95)
    names = [f"{name}_{view}" for name in depth.FP8_FORMATS for view in depth.VIEWS]
    result = dict(kind="random", layers=2, seed=0, **dict.fromkeys(names, view))
    rows = {tuple(line.split(" | ")[1:3]): line.split(" | ") for line in depth.table([result]).splitlines()[2:]}
    assert len(rows) == len(names)
    assert rows["fp8_block", "decode"][-2] == "87.5%"
    assert rows["fp8_block", "prefill"][-2] == "70.0%"
    assert rows["fp8_block", "prefill"][6] == "70.0%"


def test_every_arm_is_a_recipe_and_the_table_has_means_over_runs(tmp_path: Path) -> None:
    matrix = read_matrix(Path(precision.__file__).with_suffix(".yaml"))
    cells = list(cells_of(matrix, precision.NAME, tmp_path))
    recipes = {cell.arm: cell.resolved() for cell in cells}
    assert recipes["fp8_fp8"].learner.fp8_emulation
    assert recipes["fp8_fp8"].rollout == recipes["bf16_fp8"].rollout
    series = dict.fromkeys(matrix.experiments[precision.NAME].series)
    results = [
        a_result("fp8_fp8", seed, [[1, 2]], samples=2, series={name: [ess, ess] for name in series})
        for seed, ess in ((1, 0.98), (2, 1.0))
    ]
    _, _, row = precision.table(matrix.experiments[precision.NAME], results).splitlines()
    # Half of the interval: t(.975, 1) × .0141 / √2 = 12.71 × .01.
    assert row.startswith("| FP8 / FP8 | 2 | 0.9900 ± 0.1271 |")
    assert row.endswith("| 0.750 ± 0.000 |")
