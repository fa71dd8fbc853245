"""What the page on robust objectives makes of its matrix and of measured numbers. No engine is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import RecipeError
from tests.evidence import robust_page
from tests.evidence.matrix import Cell, Matrix, cells_of, read_matrix
from tests.evidence.results import SETTLED, Result, keep, load, save, unmeasured
from tests.evidence.robust_table import MATRIX, Results, RobustTable, stand_in
from tests.support.evidence import a_result


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return read_matrix(MATRIX)


def result(condition: str, arm: str, seed: int, end: int) -> Result:
    """So many of ten answers right at the end."""
    return a_result(arm, seed, [[3], [end]], condition=condition)


def page(matrix: Matrix, results: Results) -> str:
    return robust_page.page(matrix, results, RobustTable.of(matrix, results))


def cell(matrix: Matrix, experiment: str, condition: str, arm: str) -> Cell:
    found = cells_of(matrix, experiment, Path("runs"))
    return next(one for one in found if (one.condition, one.arm, one.seed) == (condition, arm, 1))


def test_the_arms_are_what_their_names_say(matrix: Matrix) -> None:
    """The constant is that of the mean age at full lag; by age the rate itself stays."""
    for name, lag in (("lag8", 8), ("lag4", 4)):
        condition = next(iter(matrix.experiments[name].conditions))
        plain = cell(matrix, name, condition, "cispo").resolved()
        assert plain.build_schedule().lag == lag
        for arm in matrix.experiments[name].arms:
            optimizer = cell(matrix, name, condition, arm).resolved().learner.optimizer
            full = plain.learner.optimizer.lr
            expected = full / (1 + lag) ** 0.5 if arm.endswith("_const") else full
            assert optimizer.lr == pytest.approx(expected, rel=1e-4), arm
            by = "sqrt" if arm.endswith("_age") else "ess" if arm.endswith("_ess") else "none"
            assert optimizer.lr_by_lag == by, arm
            kept = cell(matrix, name, condition, arm).resolved().num_kept_versions
            assert (kept == lag) == (arm.split("_")[0] in ("split", "decoupled") or by == "ess"), arm


def test_every_cell_is_a_recipe(matrix: Matrix) -> None:
    for name, experiment in matrix.experiments.items():
        for condition in experiment.conditions:
            one = cell(matrix, name, condition, "cispo")
            try:
                one.resolved()
            except RecipeError as error:
                pytest.fail(f"{one.name}: {error}")


def test_what_is_the_same_without_lag_is_measured_once(matrix: Matrix) -> None:
    assert stand_in("p3o_importance_const") == "p3o_importance"
    assert stand_in("split_age") == stand_in("decoupled") == stand_in("cispo_ess") == "cispo"
    results = {"fresh": [result("t12", "cispo", 1, 6)], "lag8": [result("fp32", "cispo", 1, 2)]}
    scores = RobustTable.of(matrix, results).scores
    said = {arm: {place: str(score) for place, score in row.items()} for arm, row in scores.items()}
    assert said["split"] == {("fresh", "t12"): "= .60"}
    assert said["cispo"] == {("fresh", "t12"): ".60", ("lag8", "fp32"): ".20"}
    assert "p3o" not in said


def test_the_page_names_who_passes_the_bar_and_who_is_nearest(matrix: Matrix) -> None:
    cells = [(name, condition) for name, e in matrix.experiments.items() for condition in e.conditions]

    def written(worst: int) -> str:
        results = {
            name: [
                result(condition, arm, seed, ends if (name, condition) == ("lag8", "fp8") else 10)
                for own, condition in cells
                if own == name
                for seed in (1, 2, 3)
                for arm, ends in (("cispo", worst), ("cispo_age", 10))
                if arm in matrix.experiments[name].arms
            ]
            for name in matrix.experiments
        }
        return page(matrix, results)

    first = "**Passes the bar:** CISPO, cap 5, by age (1.00, in the mean 1.00, 3 or more seeds a cell)"
    assert f"{first}." in written(worst=4)
    assert f"{first}, CISPO, cap 5 (0.90, in the mean 0.99, 3 or more seeds a cell)." in written(worst=9)
    row = next(line for line in written(worst=4).splitlines() if line.startswith("| CISPO, cap 5 |"))
    assert "0.40 (.40 .40 .40)" in row
    assert row.endswith("| 0.40 | 0.40 |")
    assert "Nothing is measured yet" in page(matrix, {})
    screen = page(matrix, {"fresh": [result("t12", "cispo", 1, 6)]})
    assert "no arm has been measured in all 9 cells" in screen
    assert "1 seed: a screen" in screen


def test_the_page_says_what_the_runs_did_and_draws_the_extremes(matrix: Matrix, tmp_path: Path) -> None:
    traced = {"cispo": [0.9, 0.8, 0.1, 0.3], "cispo_age": [0.9, 0.9, 0.8, 0.7], "grpo_02": [0.9, 0.9, 0.9, 0.9]}
    ends = dict(cispo=1, cispo_age=8, grpo_02=4)
    results = {
        "lag8": [replace(result("fp8", arm, 1, end), series=dict(ess=list(traced[arm]))) for arm, end in ends.items()]
    }
    robust_page.write_page(matrix, results, tmp_path / "robust.md")
    lines = (tmp_path / "robust.md").read_text().splitlines()
    header = next(line for line in lines if line.startswith("| arm | pass@1 at the end"))
    rows = [line for line in lines[lines.index(header) :] if line.startswith(("| CISPO", "| GRPO"))]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == [
        "CISPO, cap 5, by age",
        "GRPO, clip 0.2",
        "CISPO, cap 5",
    ]
    said = dict(zip(header.split(" | "), rows[-1].split(" | "), strict=True))
    assert (said["lowest ESS"], said["ESS, late"], said["entropy, late"]) == ("0.1", "0.3", "–")
    drawn = robust_page._contrast(matrix.experiments["lag8"], results["lag8"])
    assert drawn is not None
    assert list(drawn.conditions) == ["fp8"]
    assert list(drawn.arms) == ["cispo", "cispo_age", "cispo_const", "cispo_ess"], "the best one is a twin of the worst"
    assert sorted(path.name for path in (tmp_path / "evidence").iterdir()) == ["robust-lag8.png", "robust.png"]


def test_a_cell_whose_result_is_kept_is_run_nowhere_again(tmp_path: Path, matrix: Matrix) -> None:
    path = tmp_path / "robust-fresh.json"
    cells = [one for one in cells_of(matrix, "fresh", tmp_path) if (one.condition, one.arm) == ("t12", "cispo")]
    save(path, [result("t12", "cispo", 2, 5)])
    assert [one.seed for one in unmeasured(path, cells)] == [1, 3]
    keep(path, cells, (), SETTLED)
    assert load(path) == [result("t12", "cispo", 2, 5)], "no run directory is there, so nothing changes"
    save(path, [result("t12", "cispo", 2, 5), result("t12", "cispo", 3, 6)])
    keep(path, [one for one in cells if one.seed == 3], (), SETTLED)
    assert [one.seed for one in load(path)] == [3, 2], "what is declared no more is not lost"
