"""What the depth study and the precision table make of measured numbers. No engine is started."""

from __future__ import annotations

from pathlib import Path

from tests.evidence import precision
from tests.evidence.matrix import cells_of, read_matrix
from tests.support.evidence import a_result


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
