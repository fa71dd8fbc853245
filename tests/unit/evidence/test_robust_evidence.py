"""What the page on robust objectives makes of its matrix and of measured numbers. No engine is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import RecipeError
from tests.evidence import robust_page
from tests.evidence.matrix import Cell, Matrix, cells_of, read_matrix
from tests.evidence.results import SETTLED, Result, keep, load, save, unmeasured
from tests.evidence.robust_contrasts import asked_beforehand
from tests.evidence.robust_repeat import Repeats
from tests.evidence.robust_table import FRESH, MATRIX, Place, Results, RobustTable, Score, stand_in
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

    by_age = "| CISPO, cap 5, by age | 1.00 | lag 8 | 1.00 | 3 or more | 4 of 9 | 100% | 100% |"
    assert f"**1 of 2 arms pass the bar:**\n\n{HEADER}\n{by_age}\n\n" in written(worst=4)
    both = f"{by_age}\n| CISPO, cap 5 | 0.90 | lag 8 and block FP8 rollouts | 0.99 | 3 or more | 9 of 9 | 100% | 0% |\n"
    assert f"**2 of 2 arms pass the bar:**\n\n{HEADER}\n{both}" in written(worst=9)
    assert "not decided" not in written(worst=9)
    row = next(line for line in written(worst=4).splitlines() if line.startswith("| CISPO, cap 5 | 1.00"))
    assert "0.40 (.40 .40 .40)" in row
    assert row.endswith("| 0.40 | 0.40 | – |"), "nothing was evaluated at 60"
    assert "Nothing is measured yet" in page(matrix, {})
    screen = page(matrix, {"fresh": [result("t12", "cispo", 1, 6)]})
    assert "no arm has been measured in all 9 cells" in screen
    assert "Some scores have 1 of 3 seeds" in screen
    row = next(line for line in screen.splitlines() if line.startswith("| CISPO, cap 5, by ESS | …"))
    assert "| … | … | … | = .60 | … | … | … | … | – |" in row, "what is declared nowhere, and what is to come"


HEADER = (
    "| arm | worst share | in | mean share | seeds a cell | cells of its own | passes again | first again |\n"
    "|---|---|---|---|---|---|---|---|"
)


def test_who_held_half_way_is_named(matrix: Matrix) -> None:
    """CISPO is level with the other at version 60, and far below at 120."""
    results = {
        name: [
            a_result(arm, seed, scores, condition=condition)
            for condition in e.conditions
            for seed in (1, 2)
            for arm, end in (("cispo", 2), ("cispo_age", 8))
            for scores in [[[1]] * 6 + [[8]] + [[end if name != "fresh" else 8]] * (6 * (name != "fresh"))]
            if arm in e.arms
        ]
        for name, e in matrix.experiments.items()
    }
    written = page(matrix, results)
    assert "After 60 updates, half of the stale runs, these were above the bar as well: CISPO, cap 5 (1.00)." in written
    row = next(line for line in written.splitlines() if line.startswith("| CISPO, cap 5 | 0.20"))
    assert row.endswith("| 0.20 | 0.25 | 1.00 |")
    assert "Where nothing differs, for comparison: CISPO, cap 5 0.20 (.20 .20)." in written


def test_repetitions_know_the_scatter_and_what_is_one_arm(matrix: Matrix) -> None:
    """In each of 9 cells the second arm has .85 of the first, with a standard error of .02 on both."""

    def row(arm: str, mean: float) -> dict[Place, Score]:
        own = {cell: Score([mean - 0.02, mean + 0.02]) for cell in RobustTable.of(matrix, {}).cells if cell[0] != FRESH}
        return own | {cell: Score(one.ends, stands_in=arm == "cispo_age") for cell, one in fresh(mean, arm).items()}

    def fresh(mean: float, arm: str) -> dict[Place, Score]:
        taken = 0.8 if arm == "cispo_age" else mean
        return {
            cell: Score([taken - 0.02, taken + 0.02]) for cell in RobustTable.of(matrix, {}).cells if cell[0] == FRESH
        }

    empty = RobustTable.of(matrix, {})
    titles = dict(cispo="CISPO", cispo_age="by age")
    table = RobustTable(titles, empty.cells, dict(cispo=row("cispo", 0.8), cispo_age=row("cispo_age", 0.68)))
    repeats = Repeats.of(table)
    assert repeats is not None
    assert repeats.passes["cispo"] == 1.0
    # Four cells of its own: a share of .85 ± sqrt(.02² + (.85 x .02)²) / .8 is .8 or more with .936; .936^4 = .767.
    assert repeats.passes["cispo_age"] == pytest.approx(0.767, abs=0.02)
    assert repeats.first["cispo"] > 0.95
    one_seed = {
        arm: {cell: Score(one.ends[:1], one.stands_in) for cell, one in r.items()} for arm, r in table.scores.items()
    }
    assert Repeats.of(RobustTable(titles, empty.cells, one_seed)) is None


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
