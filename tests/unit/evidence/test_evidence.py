"""The machinery behind `make evidence`: cells, what is harvested, verdicts. No engine is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.rollout.evaluation import summarize
from tests.evidence.claims import Judged, judge
from tests.evidence.matrix import REPOSITORY, Cell, Experiment, Matrix, cells_of, read_matrix
from tests.evidence.results import Arm, Result, harvest
from tests.support.evidence import a_result

SHIPPED = REPOSITORY / "tests" / "evidence"


def small_matrix(**experiment: Any) -> dict[str, Any]:
    """One experiment of two arms and two seeds."""
    return dict(
        models=dict(tiny=dict(recipe="pipeline/recipes/demo.yaml", steps=5, set={"task.max_digits": 6})),
        experiments=dict(
            trial=dict(
                title="A trial",
                text="Which is better?",
                model="tiny",
                set={"run.steps": 20, "evaluation.every": 10},
                conditions=dict(plain=dict(title="as it is")),
                arms=dict(
                    p3o=dict(title="P3O"),
                    grpo=dict(title="GRPO", set=dict(objective=dict(name="clipped", clip_low=0.3))),
                ),
                seeds=[1, 2],
                series=["ess"],
                **experiment,
            )
        ),
    )


def matrix_file(folder: Path, **experiment: Any) -> Path:
    path = folder / "matrix.yaml"
    path.write_text(yaml.safe_dump(small_matrix(**experiment), sort_keys=False))
    return path


def result(arm: str, seed: int, scores: Sequence[Sequence[int]], *, samples: int = 4, **fields: Any) -> Result:
    return a_result(arm, seed, scores, samples=samples, **(dict(series=dict(ess=[0.9, None, 0.7])) | fields))


class TestMatrix:
    def test_a_cell_is_recipe_and_overrides(self, tmp_path: Path) -> None:
        matrix = read_matrix(matrix_file(tmp_path))
        cells = list(cells_of(matrix, "trial", tmp_path / "runs"))
        assert [cell.name for cell in cells] == [
            "trial-plain-p3o-s1",
            "trial-plain-grpo-s1",
            "trial-plain-p3o-s2",
            "trial-plain-grpo-s2",
        ]
        recipe = cells[1].resolved()
        assert recipe.directory == tmp_path / "runs" / "trial-plain-grpo-s1"
        assert recipe.model.path == tmp_path / "runs" / "models" / "tiny"
        assert (recipe.run.seed, recipe.run.steps, recipe.task.max_digits) == (1, 20, 6)  # type: ignore[union-attr]
        assert (recipe.objective.name, recipe.objective.clip_low) == ("clipped", 0.3)  # type: ignore[union-attr]

    @pytest.mark.parametrize("name", ["matrix", "robust", "schedules", "precision"])
    @pytest.mark.parametrize("quick", [False, True])
    def test_every_shipped_cell_is_a_valid_recipe_with_a_name_of_its_own(
        self, tmp_path: Path, name: str, quick: bool
    ) -> None:
        matrix = read_matrix(SHIPPED / f"{name}.yaml", quick=quick)
        cells = [cell for experiment in matrix.experiments for cell in cells_of(matrix, experiment, tmp_path)]
        assert len({cell.name for cell in cells}) == len(cells) > 0
        for cell in cells:
            assert cell.resolved().run.name == cell.name


def begin(cell: Cell, *events: tuple[str, dict[str, Any]]) -> EventLog:
    """A run directory as `evenkeel train` leaves it."""
    run = RunDirectory(cell.directory)
    run.path.mkdir(parents=True)
    run.freeze(cell.resolved())
    event_log = EventLog(run.path, "learner-000001")
    for kind, fields in events:
        event_log.event(kind, **fields)  # type: ignore[arg-type]
    return event_log


class TestHarvest:
    def test_seconds_of_training_leave_evaluations_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Version 0 is evaluated before the first batch is asked for, at 100 s. Version 10 is published at 130 s: 30 s
        of training. Its evaluation takes 131 to 137 s, so version 20, published at 160 s, cost 60 - 6 = 54 s."""
        cell = next(cells_of(read_matrix(matrix_file(tmp_path)), "trial", tmp_path / "runs"))
        event_log = begin(cell)
        clock = [90.0]
        monkeypatch.setattr("pipeline.data.event_log.time.time", lambda: clock[0])

        def event(at: float, kind: Any, **fields: Any) -> None:
            clock[0] = at
            event_log.event(kind, **fields)

        def evaluated(started: float, seconds: float, version: int, correct: list[int]) -> None:
            scores = dict(prompts=2, samples=4, correct=correct, **summarize(correct, [4, 4]))
            event(started + seconds, "evaluated", version=version, started=started, seconds=seconds, **scores)

        evaluated(91.0, 5.0, 0, [1, 0])
        event(100.0, "issued", batch=0)
        event(130.0, "published", version=10)
        evaluated(131.0, 6.0, 10, [2, 4])
        event(160.0, "published", version=20)
        evaluated(161.0, 6.0, 20, [3, 4])
        evaluated(190.0, 6.0, 30, [4, 4])  # its event of the publish was lost
        event_log.metrics(0, ess=0.123456789)
        event_log.metrics(2, ess=0.5)
        found = harvest(cell, ["ess", "entropy"])
        assert found is not None
        assert [e.trained_s for e in found.evaluations] == [0.0, 30.0, 54.0, 78.0]
        assert found.pass_at(1).tolist() == [[0.25, 0.0], [0.5, 1.0], [0.75, 1.0], [1.0, 1.0]]
        assert found.series == dict(ess=[0.12346, None, 0.5], entropy=[None, None, None])
        assert (found.state, found.steps, found.steps_planned, found.samples_per_step) == ("unfinished", 3, 20, 256)

    def test_after_it_diverged_a_run_scores_nothing(self) -> None:
        whole = result("p3o", 1, [[2, 2], [4, 4], [4, 4]])
        broken = result("p3o", 2, [[2, 2], [4, 0]], state="diverged")
        arm = Arm.of([broken, whole], "plain", "p3o")
        assert arm.seeds == [1, 2]
        assert arm.versions == [0, 10, 20]
        assert arm.curve()[1].tolist() == [[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]]

    def test_what_did_not_come_to_its_end_does_not_count(self) -> None:
        whole, under_way = result("p3o", 1, [[2], [4], [4]]), result("p3o", 2, [[2], [4]], state="unfinished")
        arm = Arm.of([whole, under_way, result("p3o", 3, [[2]], state="failed")], "plain", "p3o")
        assert arm.seeds == [1]
        assert arm.costs("samples").tolist() == [0.0, 2560.0, 5120.0]
        assert arm.costs("seconds").tolist() == [0.0, 10.0, 20.0]


def experiment_with(judged: dict[str, Any], **fields: Any) -> Experiment:
    claim = dict(text="a claim", source="a paper", judge=judged)
    return Matrix.model_validate(small_matrix(claims=[claim], **fields)).experiments["trial"]


def verdicts(experiment: Experiment, results: Sequence[Result]) -> Judged:
    return judge(dict(trial=experiment), dict(trial=results))["trial"][0]


def answer(experiment: Experiment, results: Sequence[Result]) -> str:
    return verdicts(experiment, results).verdicts[0].answer


def runs(arm: str, *ends: Sequence[int]) -> list[Result]:
    """Three runs of eight prompts and 1000 answers; each row is one run's right answers by evaluation."""
    return [result(arm, seed, [[c] * 8 for c in row], samples=1000) for seed, row in enumerate(ends, 1)]


HIGH, MIDDLE, LOW = [[1] * 8, [4] * 8], [[1] * 8, [3, 4] * 4], [[1] * 8, [2] * 8]
STRONG = runs("p3o", (300, 880), (310, 900), (290, 920))
WEAK = runs("grpo", (300, 500), (300, 520), (310, 480))


class TestClaims:
    def test_decay_and_holding(self) -> None:
        decays, holds = dict(kind="decays", arm="p3o"), dict(kind="holds", arm="p3o")
        falls = runs("p3o", (300, 800, 300), (310, 810, 320), (290, 790, 310))
        stays = runs("p3o", (300, 800, 800), (310, 810, 820), (290, 790, 790))
        assert [answer(experiment_with(decays), r) for r in (falls, stays)] == ["shown", "refuted"]
        assert [answer(experiment_with(holds), r) for r in (falls, stays)] == ["refuted", "shown"]

    def test_a_curve_that_learned_nothing_does_not_hold(self) -> None:
        zero = runs("p3o", (10, 0, 0), (0, 10, 0), (0, 0, 10))
        assert answer(experiment_with(dict(kind="holds", arm="p3o")), zero) == "undecided"

    def test_better(self) -> None:
        better = dict(kind="better", arm="p3o", than="grpo")
        assert answer(experiment_with(better), [*STRONG, *WEAK]) == "shown"
        assert answer(experiment_with(better | dict(arm="grpo", than="p3o")), [*STRONG, *WEAK]) == "refuted"
        # .400 with a spread of .02, and of .3: the run is the unit, however many prompts there are.
        wild = runs("grpo", (300, 200), (300, 500), (310, 800))
        assert answer(experiment_with(better), [*STRONG, *wild]) == "undecided"
