"""Every step is in the export once, as it was trained last: after a kill, a resume, a torn end."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.export import export as module
from launch.export.export import Key, RunPoints, export
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError, RunConflictError, StoreError
from pipeline.repair import find_damage
from tests.support.written_runs import write_run
from tests.unit.launch.export.growing import (
    Rows,
    exporter,
    kill_after,
    tensorboard_curve,
    tensorboard_rows,
    train,
    wandb_history,
    wandb_records,
    wandb_rows,
)

READERS = {"tensorboard": tensorboard_rows, "wandb": wandb_rows}


@pytest.fixture(params=READERS)
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


def test_evaluations_are_points_of_their_versions(tmp_path: Path, target: str) -> None:
    path = write_run(tmp_path, 4, steps=24)
    assert export(path, target, None, follow=False)["versions"] == 2
    points = RunPoints(path).read()
    assert points[Key("version", 0)].values["evaluation/pass_at_1"] == 0.125
    assert points[Key("version", 4)].values["evaluation/pass_at_k/8"] == 0.75
    assert points[Key("step", 3)].values["seconds/wait"] == 1.2
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


def test_names_have_a_group_and_only_finite_numbers_are_told(run: Path) -> None:
    mismatch = {"age": {"0": {"ess": 0.5, "n": None}}}
    EventLog(run, "learner-000002").metrics(0, loss=1, ok=True, name="x", bins=[1.0], mismatch=mismatch)
    values = RunPoints(run).read()[Key("step", 0)].values
    assert values == {"train/loss": 1.0, "mismatch/age/0/ess": 0.5}


def test_follow_ends_when_the_run_is_finished(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(_: float) -> None:
        train(run, 1, range(8, 24))
        for role in ("learner", "collector"):
            RunDirectory(run).set_finished(role)

    monkeypatch.setattr(module.time, "sleep", wait)
    assert export(run, "tensorboard", None, follow=True)["steps"] == 24


def test_what_cannot_be_exported_is_refused(run: Path, tmp_path: Path) -> None:
    from launch.export.export import _alone

    with pytest.raises(RecipeError, match="--to is 'excel', expected tensorboard or wandb"):
        export(run, "excel", None, follow=False)
    with pytest.raises(StoreError, match="does not exist; give the folder of a run"):
        export(tmp_path / "nothing", "wandb", None, follow=False)
    with (
        _alone(run / "exports" / "wandb"),
        pytest.raises(RunConflictError, match="another exporter is at work"),
    ):
        export(run, "wandb", None, follow=False)


def test_a_damaged_line_is_left_out_and_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = next((run / "metrics").iterdir())
    log.write_bytes(log.read_bytes().replace(b'"step": 3', b'"stop": 3'))
    assert export(run, "tensorboard", None, follow=False)["steps"] == 7
    assert "warning: 1 line of" in capsys.readouterr().err
