"""What the comparison of schedules makes of measured numbers. No engine is started."""

from __future__ import annotations

from pathlib import Path

from tests.evidence import schedules
from tests.evidence.matrix import cells_of, read_matrix
from tests.evidence.results import Evaluation, Result
from tests.support.evidence import a_result


def result(arm: str, seed: int, right: list[int]) -> Result:
    """Of ten answers at version 0, 4, 8, … so many are right."""
    evaluations = [
        Evaluation(version=4 * place, samples=10, correct=[count], trained_s=99.0) for place, count in enumerate(right)
    ]
    return a_result(arm, seed, [], condition="fp32", evaluations=evaluations)


def test_the_arms_differ_in_their_schedule_alone_and_clocks_have_whole_stages(tmp_path: Path) -> None:
    matrix = read_matrix(Path(schedules.__file__).with_suffix(".yaml"))
    recipes = {cell.arm: cell.resolved() for cell in cells_of(matrix, schedules.NAME, tmp_path) if cell.seed == 1}
    by_age = {arm for arm in recipes if arm.endswith("_age")}
    assert (
        len({str(recipes[arm].build_schedule()) for arm in recipes.keys() - by_age}) == len(recipes) - len(by_age) == 5
    )
    others = {
        arm: recipe.model_dump(mode="json", exclude={"schedule": True, "run": True, "learner": {"optimizer"}})
        for arm, recipe in recipes.items()
    }
    assert all(one == others["sync"] for one in others.values())
    for arm, recipe in recipes.items():
        optimizer = recipes["sync"].learner.optimizer.model_copy(
            update=dict(lr_by_lag="sqrt" if arm in by_age else "none")
        )
        assert recipe.learner.optimizer == optimizer
        assert recipe.build_schedule() == recipes[arm.removesuffix("_age")].build_schedule()
        clocked = (schedules.CLOCK_WARM, schedules.CLOCK_STEPS)
        assert [recipe.build_schedule().publishes_after(step - 1) for step in clocked] == [True, True]


def test_a_level_is_reached_at_an_evaluated_version_and_nowhere_between() -> None:
    experiment = read_matrix(Path(schedules.__file__).with_suffix(".yaml")).experiments[schedules.NAME]
    results = [result("sync", 1, [3, 5, 7]), result("sync", 2, [3, 6, 9]), result("async_1", 1, [3, 5, 5])]
    assert [schedules.first_at(one, 0.6) for one in results] == [8, 4, None]
    rows = schedules.table(experiment, results, {"sync": [1.0, 3.0, 2.0]}).splitlines()[2:]
    assert [cell.strip() for cell in rows[0].split("|")[1:-1]] == [
        "sync",
        "2.00 (1.00 to 3.00)",
        "2",
        "0.300 (0.300 to 0.300)",
        "0.800 (0.700 to 0.900)",
        "1,536 (1,024 to 2,048)",
        "12.0 (8.0 to 16.0)",
        "2,048 (2,048 to 2,048)",
        "16.0 (16.0 to 16.0)",
    ]
    assert rows[1].split("|")[-2].strip() == "–; not in 1 of 1"
