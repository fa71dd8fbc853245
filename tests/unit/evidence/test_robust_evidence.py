"""What the page on robust objectives makes of its matrix and of measured numbers. No engine is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import RecipeError
from tests.evidence.matrix import Cell, Matrix, cells_of, read_matrix
from tests.evidence.results import SETTLED, Result, keep, load, save, unmeasured
from tests.evidence.robust import MATRIX, RobustTable, asked_beforehand, stand_in, write_page
from tests.support.evidence import a_result


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return read_matrix(MATRIX)


def result(condition: str, arm: str, seed: int, end: int) -> Result:
    """So many of ten answers right at the end."""
    return a_result(arm, seed, [[3], [end]], condition=condition)


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
    assert said["split"] == {("fresh", "t12"): "=.60"}
    assert said["cispo"] == {("fresh", "t12"): ".60", ("lag8", "fp32"): ".20"}
    assert "p3o" not in said


def test_the_page_names_who_passes_the_bar(matrix: Matrix, tmp_path: Path) -> None:
    """CISPO reaches 4 of the 10 of the best arm in one cell, and all in the others."""
    results = {
        name: [
            result(condition, arm, seed, worst if (name, condition) == ("lag8", "fp8") else 10)
            for condition in one.conditions
            for seed in (1, 2, 3)
            for arm, worst in (("cispo", 4), ("cispo_age", 10))
            if arm in one.arms
        ]
        for name, one in matrix.experiments.items()
    }
    write_page(matrix, results, tmp_path / "robust.md")
    page = (tmp_path / "robust.md").read_text()
    assert "**1 of 2 arms pass the bar.**" in page
    assert "| CISPO, cap 5, by age | 1.00 | lag 8 | 1.00 | 3 or more | 4 of 9 |" in page
    write_page(matrix, {}, tmp_path / "robust.md")
    assert "Nothing is measured yet" in (tmp_path / "robust.md").read_text()


def test_what_was_asked_beforehand_is_answered(matrix: Matrix) -> None:
    ends = dict(p3o_cap_const=3, cispo_const=8, cispo_age=7)
    results = [
        result(c, arm, seed, end + seed % 2) for c in ("fp32", "fp8") for arm, end in ends.items() for seed in (1, 2, 3)
    ]
    cap, age = asked_beforehand(RobustTable.of(matrix, {"lag8": results}))
    assert "**P3O's cap at the ESS fails where a cap of 5 holds**" in cap
    assert "lag 8 .37 against .87 (p < .001); lag 8 and block FP8 rollouts .37 against .87 (p < .001)" in cap
    assert "by age less the constant is -.100 ± 0.033 (standard error) over 2 pairs" in age
    assert "takes its place matters" in age
    level = [result("fp32", arm, seed, 5 + seed) for arm in ends for seed in (1, 2, 3)]
    cap, age = asked_beforehand(RobustTable.of(matrix, {"lag8": level}))
    assert "is not shown to fail everywhere" in cap
    assert "is not seen to matter" in age


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
