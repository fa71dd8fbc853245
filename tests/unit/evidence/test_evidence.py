"""The machinery behind `make evidence`: cells, resuming, statistics, verdicts and the page. No engine is started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError, RunConflictError
from pipeline.rollout.evaluation import summarize
from tests.evidence import __main__ as command
from tests.evidence import statistics
from tests.evidence.claims import judge
from tests.evidence.matrix import REPOSITORY, Cell, Claim, Experiment, Matrix, cells_of, read_matrix
from tests.evidence.page import write_page
from tests.evidence.results import Arm, Evaluation, Result, harvest, load, save, state_of
from tests.evidence.runner import Job, check_unchanged, is_settled, run_jobs
from tests.support.examples import examples

SHIPPED = REPOSITORY / "tests" / "evidence" / "matrix.yaml"


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
    """Evaluations at versions 0, 10, 20 … with the given right answers of each prompt, a second a version."""
    evaluations = [
        Evaluation(version=10 * place, samples=samples, correct=list(correct), trained_s=10.0 * place)
        for place, correct in enumerate(scores)
    ]
    kept: dict[str, Any] = dict(
        condition="plain",
        state="finished",
        reason="",
        steps=20,
        steps_planned=20,
        samples_per_step=256,
        series=dict(ess=[0.9, None, 0.7]),
    )
    return Result(arm=arm, seed=seed, evaluations=evaluations, **{**kept, **fields})


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

    def test_a_later_override_wins(self, tmp_path: Path) -> None:
        conditions = dict(plain=dict(title="a", set={"run.steps": 7, "evaluation.every": 3}))
        data = small_matrix()
        data["experiments"]["trial"]["conditions"] = conditions
        data["experiments"]["trial"]["arms"]["p3o"]["set"] = {"run.steps": 8}
        path = tmp_path / "matrix.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        recipe = next(cells_of(read_matrix(path), "trial", tmp_path)).resolved()
        assert (recipe.run.steps, recipe.evaluation.every) == (8, 3)

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            (dict(claims=[dict(text="t", source="s", judge=dict(kind="decays", arm="ppo"))]), "ppo"),
            (
                dict(
                    claims=[
                        dict(text="t", source="s", judge=dict(kind="decays", arm="p3o"), conditions=["hot"]),
                    ]
                ),
                "hot",
            ),
            (
                dict(
                    claims=[
                        dict(text="t", source="s", judge=dict(kind="faster", arm="p3o", than="grpo", cost="seconds"))
                    ]
                ),
                "target",
            ),
            (dict(columns=[dict(title="t", metric="entropy", take="min")]), "entropy"),
            (dict(color="red"), "color"),
        ],
    )
    def test_a_matrix_that_contradicts_itself_is_refused(
        self, tmp_path: Path, fields: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(RecipeError, match=named):
            read_matrix(matrix_file(tmp_path, **fields))

    def test_quick_asks_less_of_the_same(self, tmp_path: Path) -> None:
        claims = [
            dict(text="a", source="s", judge=dict(kind="decays", arm="p3o")),
            dict(text="b", source="s", judge=dict(kind="better", arm="p3o", than="grpo")),
        ]
        quick = dict(arms=["p3o"], seeds=[3], set={"run.steps": 4})
        path = matrix_file(tmp_path, claims=claims, quick=quick)
        experiment = read_matrix(path, quick=True).experiments["trial"]
        assert (list(experiment.arms), experiment.seeds) == (["p3o"], (3,))
        assert experiment.set == {"run.steps": 4, "evaluation.every": 10}
        assert [claim.text for claim in experiment.claims] == ["a"]  # the other one needs grpo
        assert len(read_matrix(path).experiments["trial"].claims) == 2

    @pytest.mark.parametrize("quick", [False, True])
    def test_every_shipped_cell_is_a_valid_recipe_with_a_name_of_its_own(self, tmp_path: Path, quick: bool) -> None:
        matrix = read_matrix(SHIPPED, quick=quick)
        cells = [cell for name in matrix.experiments for cell in cells_of(matrix, name, tmp_path)]
        assert len({cell.name for cell in cells}) == len(cells) > 0
        for cell in cells:
            recipe = cell.resolved()
            assert recipe.run.steps % recipe.evaluation.every == 0 or recipe.schedule.kind == "staged"
            assert (recipe.evaluation.prompts, recipe.evaluation.samples) == (64, 8)


def begin(cell: Cell, *events: tuple[str, dict[str, Any]]) -> EventLog:
    """A run directory as `evenkeel train` leaves it."""
    run = RunDirectory(cell.directory)
    run.path.mkdir(parents=True)
    run.freeze(cell.resolved())
    event_log = EventLog(run.path)
    for kind, fields in events:
        event_log.event(kind, **fields)  # type: ignore[arg-type]
    return event_log


class TestResuming:
    def cells(self, folder: Path) -> list[Cell]:
        return list(cells_of(read_matrix(matrix_file(folder)), "trial", folder / "runs"))

    def test_only_what_is_not_settled_is_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        finished, diverged, killed, _ = self.cells(tmp_path)
        begin(finished, ("finished", {}))
        begin(diverged)
        note = dict(process="learner", error="NonFiniteError", message="loss is nan")
        (diverged.directory / "logs" / "fatal.json").write_text(json.dumps(note))
        begin(killed)
        ran: list[str] = []

        def run(jobs: Sequence[Job], **_: Any) -> dict[str, str]:
            ran.extend(job.name for job in jobs)
            return {}

        monkeypatch.setattr(command, "run_jobs", run)
        monkeypatch.setattr(command, "make_model", lambda *_: None)
        monkeypatch.setattr(command, "REPOSITORY", tmp_path)  # its docs/ is where the page goes
        arguments = ["--root", str(tmp_path / "runs"), "--matrix", str(tmp_path / "matrix.yaml")]
        assert command.main(arguments) == 0
        assert ran == ["trial-plain-p3o-s2", "trial-plain-grpo-s2"]
        assert "diverged at step 0: loss is nan" in (tmp_path / "docs" / "evidence.md").read_text()
        assert command.main([*arguments, "--page"]) == 0
        assert len(ran) == 2

    def test_a_changed_cell_is_refused(self, tmp_path: Path) -> None:
        cells = self.cells(tmp_path)
        begin(cells[0], ("finished", {}))
        check_unchanged(cells)
        data = small_matrix()
        data["experiments"]["trial"]["arms"]["p3o"]["set"] = {"rollout.temperature": 1.5}
        (tmp_path / "matrix.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
        changed = list(cells_of(read_matrix(tmp_path / "matrix.yaml"), "trial", tmp_path / "runs"))
        with pytest.raises(
            RunConflictError, match=r"trial-plain-p3o-s1 .*rollout.temperature: 1.0 → 1.5.*another name"
        ):
            check_unchanged(changed)

    def test_other_errors_than_divergence_are_tried_again(self, tmp_path: Path) -> None:
        cell = self.cells(tmp_path)[0]
        begin(cell)
        note = dict(process="engine-0", error="EngineStartError", message="port taken")
        (cell.directory / "logs" / "fatal.json").write_text(json.dumps(note))
        assert state_of(cell.directory) == ("failed", "port taken")
        assert not is_settled(cell)

    def test_jobs_report_what_failed_and_why(self, tmp_path: Path) -> None:
        recipe = str(REPOSITORY / "pipeline" / "recipes" / "demo.yaml")
        jobs = [
            Job(name="good", arguments=("recipe", recipe), log=tmp_path / "good.log", deadline_s=60),
            Job(name="bad", arguments=("recipe", "nothing.yaml"), log=tmp_path / "bad.log", deadline_s=60),
        ]
        said: list[str] = []
        failures = run_jobs(jobs, at_once=2, say=said.append)
        assert list(failures) == ["bad"]
        assert "nothing.yaml" in failures["bad"]
        assert len(said) == 2
        assert "objective:" in (tmp_path / "good.log").read_text()


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
            scores = dict(prompts=2, samples=4, correct=correct, **summarize(correct, 4))
            event(started + seconds, "evaluated", version=version, started=started, seconds=seconds, **scores)

        evaluated(91.0, 5.0, 0, [1, 0])
        event(100.0, "issued", batch=0)
        event(130.0, "published", version=10)
        evaluated(131.0, 6.0, 10, [2, 4])
        event(160.0, "published", version=20)
        evaluated(161.0, 6.0, 20, [3, 4])
        event_log.metrics(0, ess=0.123456789)
        event_log.metrics(2, ess=0.5)
        found = harvest(cell, ["ess", "entropy"])
        assert found is not None
        assert [e.trained_s for e in found.evaluations] == [0.0, 30.0, 54.0]
        assert found.pass_at(1).tolist() == [[0.25, 0.0], [0.5, 1.0], [0.75, 1.0]]
        assert found.series == dict(ess=[0.12346, None, 0.5], entropy=[None, None, None])
        assert (found.state, found.steps, found.steps_planned, found.samples_per_step) == ("unfinished", 3, 20, 256)

    def test_nothing_comes_of_a_cell_that_was_never_started(self, tmp_path: Path) -> None:
        cell = next(cells_of(read_matrix(matrix_file(tmp_path)), "trial", tmp_path / "runs"))
        assert harvest(cell, ["ess"]) is None

    def test_what_is_kept_comes_back(self, tmp_path: Path) -> None:
        results = [result("p3o", 1, [[1, 2], [3, 4]]), result("grpo", 2, [[0, 0]], state="diverged", reason="nan")]
        save(tmp_path / "deep" / "trial.json", results)
        assert load(tmp_path / "deep" / "trial.json") == results
        assert load(tmp_path / "none.json") == []

    def test_after_it_diverged_a_run_scores_nothing(self) -> None:
        whole = result("p3o", 1, [[2, 2], [4, 4], [4, 4]])
        broken = result("p3o", 2, [[2, 2], [4, 0]], state="diverged")
        arm = Arm.of([broken, whole], "plain", "p3o")
        assert arm.seeds == [1, 2]
        assert arm.versions == [0, 10, 20]
        assert arm.curve()[1].tolist() == [[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]]

    def test_of_unfinished_cells_the_common_part_counts(self) -> None:
        arm = Arm.of(
            [result("p3o", 1, [[2], [4], [4]]), result("p3o", 2, [[2], [4]], state="unfinished")], "plain", "p3o"
        )
        assert arm.versions == [0, 10]
        assert arm.costs("samples").tolist() == [0.0, 2560.0]
        assert arm.costs("seconds").tolist() == [0.0, 10.0]


class TestStatistics:
    def test_weights_of_a_draw_sum_to_one(self) -> None:
        weights = statistics.draw_weights(2, 5, num_draws=50)
        assert weights.shape == (50, 2, 5)
        np.testing.assert_allclose(weights.sum(axis=(1, 2)), 1.0)
        # A draw may take one seed twice, then the other weighs nothing: (1/2)² + (1/2)² of all draws do.
        alone = (statistics.draw_weights(2, 5).sum(axis=2) == 0.0).any(axis=1).mean()
        assert 0.45 < alone < 0.55

    def test_interval_of_a_mean(self) -> None:
        """100 prompts, half of them solved: the standard error is sqrt(.25 / 100) = .05, so ± 1.96 × .05 = .098."""
        curve = np.zeros((1, 1, 100))
        curve[0, 0, :50] = 1.0
        estimate = statistics.at(curve, 0)
        assert estimate.value == 0.5
        assert estimate.low == pytest.approx(0.402, abs=0.015)
        assert estimate.high == pytest.approx(0.598, abs=0.015)

    def test_an_interval_is_the_same_every_time(self) -> None:
        curve = np.linspace(0.0, 1.0, 30).reshape(2, 1, 15)
        first = statistics.at(curve, 0)
        statistics.draw_weights.cache_clear()
        assert statistics.at(curve, 0) == first

    def test_fall_is_measured_from_the_best_evaluation(self) -> None:
        curve = np.array([[[0.2, 0.2], [0.8, 1.0], [0.5, 0.3]]])
        assert statistics.peak(curve) == 1
        assert statistics.fall(curve).value == pytest.approx(0.9 - 0.4)
        assert statistics.fall(curve[:, :2]) == statistics.Estimate(0.0, 0.0, 0.0)

    def test_of_equally_high_evaluations_the_later_is_the_peak(self) -> None:
        assert statistics.peak(np.array([[[1.0], [0.5], [1.0]]])) == 2

    def test_comparisons_are_paired(self) -> None:
        """Prompts differ far more than the arms: .1 on every prompt is certain when the same prompts are drawn."""
        theirs = np.linspace(0.0, 0.9, 40).reshape(1, 1, 40)
        gain = statistics.difference(theirs + 0.1, theirs)
        assert (gain.value, gain.low, gain.high) == pytest.approx((0.1, 0.1, 0.1))
        assert statistics.at(theirs, 0).high - statistics.at(theirs, 0).low > 0.1

    def test_crossing_is_linear_between_evaluations(self) -> None:
        costs = np.array([0.0, 100.0, 200.0])
        assert statistics.first_crossing([0.2, 0.6, 0.8], costs, 0.5) == pytest.approx(75.0)  # 100 × (.5-.2)/(.6-.2)
        assert statistics.first_crossing([0.5, 0.6, 0.8], costs, 0.5) == 0.0
        assert statistics.first_crossing([0.2, 0.3, 0.4], costs, 0.5) == np.inf
        assert statistics.first_crossing([0.2, 0.6, 0.4], costs, 0.6) == 100.0

    def test_a_ratio_above_one_says_cheaper(self) -> None:
        costs, slow = np.array([0.0, 100.0]), np.array([[[0.0], [0.6]]])
        fast = np.array([[[0.0], [1.0]]])
        ratio = statistics.crossing_ratio(fast, costs, slow, costs, 0.5)
        assert ratio.value == pytest.approx((100 * 0.5 / 0.6) / 50.0)
        assert statistics.crossing_ratio(slow, costs, fast, costs, 0.9).value == 0.0  # ours never gets there
        assert statistics.crossing_ratio(fast, costs, slow, costs, 0.9).value == np.inf
        assert statistics.crossing_ratio(slow, costs, slow, costs, 0.9).value == 1.0

    @settings(max_examples=examples(30))
    @given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=3), st.data())
    def test_value_lies_in_its_interval_and_order_of_prompts_means_nothing(
        self, correct: list[list[int]], data: st.DataObject
    ) -> None:
        curve = np.array(correct, float)[:, None, :] / 4.0
        estimate = statistics.at(curve, 0)
        assert estimate.low - 1e-9 <= estimate.value <= estimate.high + 1e-9
        shuffled = data.draw(st.permutations(range(3)))
        assert statistics.at(curve[:, :, shuffled], 0).value == pytest.approx(estimate.value)


def experiment_with(judged: dict[str, Any], **fields: Any) -> Experiment:
    claim = dict(text="a claim", source="a paper", judge=judged, when_shown="do it", otherwise="leave it")
    return Matrix.model_validate(small_matrix(claims=[claim], **fields)).experiments["trial"]


def answer(experiment: Experiment, results: Sequence[Result]) -> str:
    return judge(experiment, results)[0].verdicts[0].answer


HIGH, MIDDLE, LOW = [[1] * 8, [4] * 8], [[1] * 8, [3, 4] * 4], [[1] * 8, [2] * 8]


class TestClaims:
    def test_decay(self) -> None:
        decays, holds = dict(kind="decays", arm="p3o"), dict(kind="holds", arm="p3o")
        falls = [result("p3o", seed, [[1] * 8, [4] * 8, [1, 2] * 4]) for seed in (1, 2)]
        stays = [result("p3o", seed, [[1] * 8, [4] * 8, [4] * 8]) for seed in (1, 2)]
        # One of eight prompts lost altogether: a fall of .125 whose interval reaches 0.
        unsure = [result("p3o", seed, [[1] * 8, [4] * 8, [0] + [4] * 7]) for seed in (1, 2)]
        assert [answer(experiment_with(decays), r) for r in (falls, stays)] == ["shown", "refuted"]
        assert [answer(experiment_with(holds), r) for r in (falls, stays)] == ["refuted", "shown"]
        assert answer(experiment_with(decays), unsure) == answer(experiment_with(holds), unsure) == "undecided"
        assert judge(experiment_with(decays), falls)[0].consequence == "do it"
        assert judge(experiment_with(decays), stays)[0].consequence == "leave it"

    def test_better(self) -> None:
        better = experiment_with(dict(kind="better", arm="p3o", than="grpo"))
        ours = [result("p3o", seed, HIGH) for seed in (1, 2)]
        assert answer(better, [*ours, *(result("grpo", seed, LOW) for seed in (1, 2))]) == "shown"
        assert answer(better, [*ours, *(result("grpo", seed, HIGH) for seed in (1, 2))]) == "undecided"
        worse = experiment_with(dict(kind="better", arm="grpo", than="p3o"))
        assert answer(worse, [*ours, *(result("grpo", seed, LOW) for seed in (1, 2))]) == "refuted"

    def test_better_counts_common_seeds_and_says_so(self) -> None:
        better = experiment_with(dict(kind="better", arm="p3o", than="grpo"))
        results = [result("p3o", 1, HIGH), result("p3o", 2, LOW), result("grpo", 1, LOW)]
        judged = judge(better, results)[0]
        verdict = judged.verdicts[0]
        assert judged.consequence == ""  # not before every seed is there
        assert verdict.answer == "shown"  # seed 2 of p3o has nothing to be compared with
        assert verdict.figures == "pass@1 1.000 against 0.500: +0.500 (+0.500 to +0.500); 1 of 2 seeds"

    def test_what_was_not_measured_has_no_consequence(self) -> None:
        judged = judge(experiment_with(dict(kind="better", arm="p3o", than="grpo")), [result("p3o", 1, HIGH)])[0]
        assert [verdict.answer for verdict in judged.verdicts] == ["not measured"]
        assert judged.consequence == ""

    def test_an_unfinished_cell_is_not_judged(self) -> None:
        better = experiment_with(dict(kind="better", arm="p3o", than="grpo"))
        results = [result("p3o", 1, HIGH), result("grpo", 1, LOW, state="unfinished")]
        assert answer(better, results) == "not measured"

    def test_faster(self) -> None:
        """From .25 to 1 in 10 versions, .6 is reached after 2560 × .35 / .75; from .25 to .75, .5 of the way later."""
        faster = experiment_with(dict(kind="faster", arm="p3o", than="grpo", cost="samples"), target=0.6)
        results = [result("p3o", 1, HIGH), result("grpo", 1, [[1] * 8, [3] * 8])]
        verdict = judge(faster, results)[0].verdicts[0]
        assert verdict.answer == "shown"
        assert verdict.figures.startswith(
            "reaches pass@1 0.6 after 1 195 samples, the other after 1 792 samples: 1.5 times as fast (1.5 to 1.5)"
        )

    def test_forecast(self) -> None:
        """Points on a sigmoid: R_0 = .1, A = .9, B = 2, C_mid = 40 versions, asked at 200 after seeing 100."""
        versions = np.arange(0, 201, 10)
        share = np.where(versions > 0, 0.1 + 0.8 / (1.0 + (40.0 / np.maximum(versions, 1)) ** 2), 0.1)
        exact = [[round(1000 * value)] * 4 for value in share]
        told = experiment_with(dict(kind="forecast", arm="p3o", share=0.5))
        assert answer(told, [result("p3o", 1, exact, samples=1000)]) == "shown"
        collapsed = [*exact[:-1], [200] * 4]
        assert answer(told, [result("p3o", 1, collapsed, samples=1000)]) == "refuted"
        early = experiment_with(dict(kind="forecast", arm="p3o", share=0.1))  # two points are no fit
        assert answer(early, [result("p3o", 1, exact, samples=1000)]) == "undecided"
        # Points that scatter by .05 leave the end open: 0.1 below the forecast is still inside its interval.
        noisy = [[round(1000 * value) + (-1) ** place * 50] * 4 for place, value in enumerate(share)]
        noisy[0], noisy[-1] = [100] * 4, [750] * 4
        third = experiment_with(dict(kind="forecast", arm="p3o", share=0.4))
        assert answer(third, [result("p3o", 1, noisy, samples=1000)]) == "undecided"


class TestPage:
    def test_it_says_what_there_is_and_what_there_is_not(self, tmp_path: Path) -> None:
        claim = dict(text="P3O | holds", source="P3O", judge=dict(kind="holds", arm="p3o"), when_shown="Keep P3O.")
        columns = [dict(title="lowest ESS", metric="ess", take="min")]
        matrix = Matrix.model_validate(small_matrix(claims=[claim], columns=columns, target=0.9, pass_at=[1, 4]))
        diverged = result("p3o", 2, MIDDLE[:1], state="diverged", steps=7, reason="loss is nan")
        save(tmp_path / "evidence" / "trial.json", [result("p3o", 1, MIDDLE), diverged])
        write_page(matrix, tmp_path / "evidence.md", quick=False)
        page = (tmp_path / "evidence.md").read_text()
        assert "seed 2 diverged at step 7" in page
        assert "diverged at step 7: loss is nan" in page
        assert "P3O \\| holds" in page
        assert "| GRPO | – |" in page
        assert "| 0 of 2 |" in page
        assert "0.7 |" in page  # lowest ESS
        assert "(never to never)" not in page.split("## A trial")[0]
        assert (tmp_path / "evidence" / "trial.png").stat().st_size > 10_000

    def test_an_empty_matrix_has_a_page_too(self, tmp_path: Path) -> None:
        matrix = Matrix.model_validate(small_matrix())
        write_page(matrix, tmp_path / "evidence.md", quick=True)
        page = (tmp_path / "evidence.md").read_text()
        assert "make evidence QUICK=1" in page
        assert "quick version" in page
        assert not (tmp_path / "evidence" / "trial.png").exists()

    def test_consequences_are_listed_once(self, tmp_path: Path) -> None:
        text = "Keep P3O."
        claims = [
            Claim.model_validate(
                dict(text=name, source="P3O", judge=dict(kind="holds", arm="p3o"), when_shown=text)
            ).model_dump()
            for name in ("a", "b")
        ]
        matrix = Matrix.model_validate(small_matrix(claims=claims))
        save(tmp_path / "evidence" / "trial.json", [result("p3o", seed, HIGH) for seed in (1, 2)])
        write_page(matrix, tmp_path / "evidence.md", quick=False)
        assert (tmp_path / "evidence.md").read_text().count(text) == 1
