"""Every step is in the export once, as it was trained last: after a kill, a resume, a torn end."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.exit_codes import run_command
from launch.export import export as module
from launch.export.export import export, run_id
from launch.export.mlflow_names import mlflow_name
from launch.export.points import STEP, VERSION, Key, RunPoints, of_step
from pipeline.analysis.run_log import RunLog
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import add_recipe
from pipeline.errors import RecipeError, RunConflictError, StoreError
from pipeline.repair import find_damage
from tests.support.written_runs import SECONDS, step_metrics, write_run
from tests.unit.launch.export.growing import (
    Rows,
    exporter,
    kill_after,
    mlflow_rows,
    tensorboard_curve,
    tensorboard_rows,
    trackio_rows,
    train,
    wandb_history,
    wandb_records,
    wandb_rows,
)

READERS = {"tensorboard": tensorboard_rows, "wandb": wandb_rows, "mlflow": mlflow_rows, "trackio": trackio_rows}
DATABASES = ("mlflow", "trackio")
"""Slow to import and to make: only slow tests write them."""


@pytest.fixture(params=[name for name in READERS if name not in DATABASES])
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Trained from step 0 to 7 by the first start of its learner."""
    path = write_run(tmp_path, 0, steps=24)
    train(path, 1, range(8))
    return path


def rows_of(run: Path, target: str, folder: Path | None = None) -> Rows:
    return READERS[target](folder or run / "exports" / target)


def test_every_step_is_there_once_however_often_it_is_exported(run: Path, target: str) -> None:
    assert export(run, target, None, follow=False)["steps"] == 8
    train(run, 1, range(8, 10))
    assert export(run, target, None, follow=False)["steps"] == 10
    export(run, target, None, follow=False)
    assert rows_of(run, target) == {step: [100.0 + step] for step in range(10)}


def test_steps_that_a_resume_takes_back_are_there_as_they_were_trained_last(run: Path, target: str) -> None:
    export(run, target, None, follow=False)
    train(run, 2, range(5, 7))
    assert export(run, target, None, follow=False)["steps"] == 7
    trained_last = {step: [100.0 + step] for step in range(5)} | {step: [200.0 + step] for step in (5, 6)}
    assert rows_of(run, target) == trained_last


@pytest.mark.slow
@pytest.mark.parametrize("target", READERS)
def test_killed_while_it_follows_then_resumed_and_exported_again(run: Path, target: str) -> None:
    """Killed twice while it writes; then a resume of the run takes back steps that it has written."""
    train(run, 1, range(8, 30))
    kill_after(exporter(run, target), lambda: bool(rows_of(run, target)))
    kill_after(exporter(run, target), lambda: 12 in rows_of(run, target))
    train(run, 2, range(9, 33))
    result = export(run, target, None, follow=False)
    assert rows_of(run, target) == {step: [(100.0 if step < 9 else 200.0) + step] for step in range(33)}
    assert (result["steps"], result["versions"]) == (33, 0)
    if target == "tensorboard":
        assert tensorboard_curve(run / "exports" / target) == [(s, (100 if s < 9 else 200) + s) for s in range(33)]


def test_an_exported_run_is_still_whole(run: Path) -> None:
    """`evenkeel verify history` reads every file of a run; those of other tools have no checksums of ours."""
    train(run, 1, range(3))
    export(run, "tensorboard", None, follow=False)
    assert list((run / "exports").rglob("*tfevents*"))
    assert find_damage(RunDirectory(run)) == []


def test_a_torn_end_is_passed_over_wherever_it_is_torn(run: Path) -> None:
    folder = run / "exports" / "tensorboard"
    export(run, "tensorboard", None, follow=False)
    [file] = folder.glob("*tfevents*")
    data = file.read_bytes()
    for cut in range(0, len(data), len(data) // 12):
        for path in folder.glob("*tfevents*"):
            path.unlink()
        file.write_bytes(data[:cut])
        export(run, "tensorboard", None, follow=False)
        assert rows_of(run, "tensorboard") == {step: [100.0 + step] for step in range(8)}, cut


def test_what_tensorboard_holds_is_not_written_again(run: Path) -> None:
    assert export(run, "tensorboard", None, follow=False)["written"] == 8
    train(run, 1, range(8, 9))
    assert export(run, "tensorboard", None, follow=False)["written"] == 1


def test_a_run_of_weights_and_biases_has_its_recipe_and_keeps_its_id(run: Path) -> None:
    folder = run / "exports" / "wandb"
    ids, configs = set(), []
    for last in (9, 10):
        train(run, 1, range(last - 1, last))
        export(run, "wandb", None, follow=False)
        [record] = [one.run for one in wandb_records(folder) if one.WhichOneof("record_type") == "run"]
        ids.add(record.run_id)
        configs = [item.key for item in record.config.update]
    assert len(ids) == 1
    assert {"objective", "rollout", "learner"} <= set(configs)
    assert [row["_timestamp"] for row in wandb_history(folder)] == sorted(
        row["_timestamp"] for row in wandb_history(folder)
    )


def change_recipe(run: Path, step: int) -> None:
    """As a start with more steps does."""
    recipe = RunDirectory(run).recipe()
    longer = recipe.model_copy(update=dict(run=recipe.run.model_copy(update=dict(steps=recipe.run.steps + 8))))
    add_recipe(run, longer, first_step=step, first_batch=step)


@pytest.mark.parametrize("target", ["wandb", *(pytest.param(name, marks=pytest.mark.slow) for name in DATABASES)])
def test_a_run_whose_recipe_changes_stays_one(run: Path, target: str) -> None:
    export(run, target, None, follow=False)
    change_recipe(run, 8)
    train(run, 1, range(8, 10))
    export(run, target, None, follow=False)
    assert rows_of(run, target) == {step: [100.0 + step] for step in range(10)}


def test_runs_of_one_recipe_have_ids_of_their_own(run: Path, tmp_path: Path) -> None:
    once = run_id(RunLog.read(run))
    EventLog(run, "collector").event("evaluated", version=1, pass_at_1=0.5)
    assert run_id(RunLog.read(run)) != once


def test_evaluations_are_points_of_their_versions(tmp_path: Path, target: str) -> None:
    path = write_run(tmp_path, 4, steps=24)
    assert export(path, target, None, follow=False)["versions"] == 2
    points = RunPoints(path).read()
    assert points[Key(VERSION, 0)].values["evaluation/pass_at_1"] == 0.125
    assert points[Key(VERSION, 4)].values["evaluation/pass_at_k/8"] == 0.75
    assert points[Key(STEP, 3)].values["seconds/wait"] == 1.2
    if target == "wandb":
        rows = wandb_history(path / "exports" / "wandb")
        assert [row["version"] for row in rows if "version" in row] == [0, 4]
        assert [row["step"] for row in rows if "step" in row] == [0, 1, 2, 3]
        records = (one.metric for one in wandb_records(path / "exports" / "wandb") if one.HasField("metric"))
        axes = {metric.name: metric.step_metric for metric in records}
        assert {name: axes[name] for name in ("evaluation/pass_at_k/8", "train/ess", "seconds/wait")} == {
            "evaluation/pass_at_k/8": "version",
            "train/ess": "step",
            "seconds/wait": "step",
        }


@pytest.mark.slow
@pytest.mark.parametrize("target", DATABASES)
def test_a_database_holds_several_runs_side_by_side_and_knows_what_it_holds(tmp_path: Path, target: str) -> None:
    for name, last in (("a", 3), ("b", 5)):
        run = write_run(tmp_path / name, 0, steps=24)
        train(run, 1, range(last))
        EventLog(run, "collector").event("evaluated", version=1, pass_at_1=0.5)
        first = export(run, target, tmp_path / "all", follow=False)
        again = export(run, target, tmp_path / "all", follow=False)
        assert (first["steps"], first["versions"], again["versions"], again["written"]) == (last, 1, 1, 0)
    twice, once = ({step: [100.0 + step] * times for step in steps} for steps, times in ((range(3), 2), ((3, 4), 1)))
    assert rows_of(run, target, tmp_path / "all") == twice | once


@pytest.mark.slow
def test_mlflow_takes_parts_of_any_name_that_a_reward_may_give(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    run = write_run(tmp_path, 0, steps=24)
    parts = {"pass@1": 0.25, "a//b": 0.5, "plain": 0.75}
    EventLog(run, "learner-000001").metrics(0, **step_metrics(0, SECONDS), reward_parts=parts)
    assert export(run, "mlflow", None, follow=False)["written"] == 1
    assert export(run, "mlflow", None, follow=False)["written"] == 0
    client = MlflowClient(tracking_uri=f"sqlite:///{run.resolve()}/exports/mlflow/mlflow.db")
    [found] = client.search_runs([client.get_experiment_by_name("evenkeel").experiment_id])
    told = {name: value for name, value in found.data.metrics.items() if name.startswith("reward_parts/")}
    assert told == {mlflow_name(f"reward_parts/{name}"): value for name, value in parts.items()}


def test_names_have_a_group_and_only_finite_numbers_are_told() -> None:
    line = dict(
        step=3, time=5.0, loss=1, ok=True, name="x", bins=[1.0], mismatch={"age": {"0": {"ess": 0.5, "n": None}}}
    )
    assert of_step(line) == {"train/loss": 1.0, "mismatch/age/0/ess": 0.5}


def test_follow_ends_when_the_run_is_finished(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(_: float) -> None:
        train(run, 1, range(8, 24))
        for role in ("learner", "collector"):
            RunDirectory(run).set_finished(role)

    monkeypatch.setattr(module.time, "sleep", wait)
    assert export(run, "tensorboard", None, follow=True)["steps"] == 24


@pytest.mark.parametrize(
    ("package", "install"),
    [
        ("tensorboard", "'tensorboard>=2.18'"),
        ("wandb", "'wandb>=0.25'"),
        ("mlflow", "'mlflow-skinny>=3.10' 'sqlalchemy>=2' 'alembic>=1.16' 'cryptography>=43'"),
        ("trackio", "'trackio>=0.40'"),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(
    run: Path, package: str, install: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == package or name == f"launch.export.{package}"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert run_command(lambda: export(run, package, None, follow=False)) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"needs {package}" in said
    assert f"pip install {install}" in said


def test_what_cannot_be_exported_is_refused(run: Path, tmp_path: Path) -> None:
    from launch.export.export import _alone

    with pytest.raises(RecipeError, match="--to is 'excel', expected tensorboard, wandb, mlflow or trackio"):
        export(run, "excel", None, follow=False)
    with pytest.raises(StoreError, match="does not exist; give the folder of a run"):
        export(tmp_path / "nothing", "wandb", None, follow=False)
    with (
        _alone(run / "exports" / "wandb", ".lock"),
        pytest.raises(RunConflictError, match="another exporter is at work"),
    ):
        export(run, "wandb", None, follow=False)


def test_a_damaged_line_is_left_out_and_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = next((run / "metrics").iterdir())
    log.write_bytes(log.read_bytes().replace(b'"step": 3', b'"step": 4'))
    assert export(run, "tensorboard", None, follow=False)["steps"] == 7
    assert "warning: 1 damaged line of" in capsys.readouterr().err
