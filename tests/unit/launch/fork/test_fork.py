"""A fork has what its checkpoint needs, whole, and nothing later; the run it comes from is not touched."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from launch.build.learner import build_rates
from launch.fork import fork
from launch.fork.fork import fork_run
from launch.verify.history import check_history
from pipeline.config.recipe import Recipe
from pipeline.control.files import ControlFiles
from pipeline.data.checksums import write_sealed, write_sealed_json
from pipeline.data.event_log import EventLog, read_events, read_metrics
from pipeline.data.files import remove_folder, temporary_name
from pipeline.data.run_directory import RunDirectory, unfenced
from pipeline.data.run_recipes import add_recipe, all_recipes
from pipeline.data.store import BatchStore
from pipeline.errors import RunConflictError, StoreError
from pipeline.resume import go_on_with
from precision.controller.policy import State
from precision.formats.quant_map import QuantMapFile
from precision.reference import ReferenceSection
from tests.support.whole_runs import damage, whole_run


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fork_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    source = whole_run(tmp_path)
    before = content(source.path)
    made = fork_run(source.path, Path("new"), 4, ["rollout.group_size=4", "learner.optimizer.lr=0.5"])
    assert content(source.path) == before
    run = RunDirectory(tmp_path / "new")
    assert made["changes"].keys() == {"rollout.group_size", "learner.optimizer.lr"}
    assert json.loads((run.path / "parent.json").read_text())["run"] == str(source.path)
    assert run.forked_at() == 4
    assert (run.saved_steps(), BatchStore(run.batches).committed()) == ([4], [0, 1, 2, 3])
    assert BatchStore(run.batches).groups_to_ask() == (8, ()), "prompts go on where they were"
    assert not run.is_published()
    assert [line["step"] for line in read_metrics(run.path)] == [0, 1, 2, 3]
    assert {event["version"] for event in read_events(run.path, "evaluated")} == {0, 2, 4} == run.evaluated_versions()
    recipes = all_recipes(run.path)
    assert [(one.first_step, one.recipe.rollout.group_size) for one in recipes] == [(0, 2), (4, 4)]
    assert {one.recipe.directory for one in recipes} == {run.path}
    history = check_history(run.path)
    assert (history["damaged"], history["lost"], history["duplicated"]) == ([], 0, 0)
    assert history["without_record"] == {}


def test_an_evaluation_that_a_later_version_answered_is_not_taken_over(tmp_path: Path) -> None:
    """The fork never has that version. Its collector evaluates what it serves."""
    source = whole_run(tmp_path, schedule=dict(kind="async", lag=2))
    for version, answered in ((2, [[2, 8], [4, 9]]), (4, [[4, 9], [5, 8]])):
        found = dict(version=4, due=version, answered=answered)
        EventLog(source.path, "collector-000002").event("evaluated", **found)
        source.write_evaluation(version, found)
    events = source.path / "events/collector-000001.jsonl"
    events.write_text(events.read_text().splitlines(True)[0])
    fork_run(source.path, Path("new"), 4)
    run = RunDirectory(tmp_path / "new")
    assert run.evaluated_versions() == {0, 2}
    assert {event.get("due", 0) for event in read_events(run.path, "evaluated")} == {0, 2}
    assert check_history(run.path)["without_record"] == {}


def test_what_a_killed_fork_left_goes_with_the_next_one_into_the_same_folder(tmp_path: Path) -> None:
    source = whole_run(tmp_path)
    killed, others = temporary_name(tmp_path / "new"), temporary_name(tmp_path / "new.er")
    for folder in (killed, others):
        (folder / "checkpoints").mkdir(parents=True)
    fork_run(source.path, Path("new"), 4)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "new", others.name}


def test_what_is_decided_after_the_step_is_decided_anew(tmp_path: Path) -> None:
    source = whole_run(tmp_path, controlled=True)
    files = ControlFiles(source.control, unfenced)
    for step, number in ((3, 1), (4, 2)):
        record = files.read(step)
        assert record is not None
        (source.control / f"{step:06d}.json").unlink()
        files.create(record.model_copy(update=dict(state=State(quant_map=number))))
        source.quant_maps.mkdir(exist_ok=True)
        write_sealed(source.quant_maps / f"{number:06d}.yaml", QuantMapFile(base="fp8_block").to_yaml())
    fork_run(source.path, Path("new"), 4)
    run = RunDirectory(tmp_path / "new")
    assert [path.name for path in sorted(run.control.iterdir())] == [f"{step:06d}.json" for step in range(4)]
    assert [path.name for path in run.quant_maps.iterdir()] == ["000001.yaml"]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_a_decay_goes_on_by_batches_where_the_fork_has_other_updates_a_batch(
    tmp_path: Path, before: int, after: int
) -> None:
    source = whole_run(tmp_path)
    data = source.recipe().model_dump(mode="json")
    optimizer = data["learner"]["optimizer"] | dict(lr=1.0, min_lr=0.1, warmup_steps=0, decay="linear")
    data["learner"] |= dict(updates_per_batch=before, optimizer=optimizer)
    add_recipe(source.path, Recipe.model_validate(data), first_step=0, first_batch=0)
    fork_run(source.path, Path("new"), 4, [f"learner.updates_per_batch={after}"])
    rates, steps, forked = build_rates(RunDirectory(tmp_path / "new")), 8, 4
    parent = [rates.at(step // before, step) for step in range(forked * before)]
    new = [rates.at(forked + step // after, forked * before + step) for step in range((steps - forked) * after)]
    assert parent == [build_rates(source).at(step // before, step) for step in range(forked * before)]
    assert 0.0 < parent[-1] - new[0] <= 0.9 / (steps * min(before, after) - 1)
    assert new[-1] == pytest.approx(0.1)
    assert new[-2] > 0.15


@pytest.mark.parametrize(("overrides", "taken"), [([], True), (["reference.path=another"], False)])
def test_the_reference_stays_the_one_that_the_run_began_with(tmp_path: Path, overrides: list[str], taken: bool) -> None:
    source = whole_run(tmp_path)
    go_on = source.recipe().model_copy(update=dict(reference=ReferenceSection(path=Path("other"), coefficient=0.1)))
    add_recipe(source.path, go_on, first_step=0, first_batch=0)
    write_sealed_json(source.reference_file, {"a.safetensors": "0"})
    fork_run(source.path, Path("new"), 4, overrides)
    assert RunDirectory(tmp_path / "new").reference_file.exists() == taken


def test_a_schedule_that_allows_less_judges_what_the_fork_samples_itself(tmp_path: Path) -> None:
    source = whole_run(tmp_path, schedule=dict(kind="async", lag=2))
    fork_run(source.path, Path("new"), 4, ["schedule.kind=sync"])
    assert check_history(tmp_path / "new")["version_violations"] == 0


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["objective.name=gspo"], "sequence"),
        (["objective.name=topr"], "constant"),
        (["objective.name=clipped", "advantage.name=dr_grpo"], "constant"),
        (["objective.name=gspo", "advantage.aggregation=token"], "token"),
        (["advantage.batch_normalized=true"], "token"),
    ],
)
def test_another_objective_is_aggregated_as_in_its_paper(tmp_path: Path, overrides: list[str], found: str) -> None:
    """The parent's frozen recipe spells out what its own objective stood for."""
    source = whole_run(tmp_path)
    fork_run(source.path, Path("new"), 4, overrides)
    assert RunDirectory(tmp_path / "new").recipe().advantage.aggregation == found


def test_solved_problems_of_a_file_keep_their_numbers(tmp_path: Path) -> None:
    """Prompts that are too long are left out, and the others counted on: with another limit, number 7 is another."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{number}=", "answer": "1"}}\n' for number in range(60)))
    source = whole_run(tmp_path)
    task = ["task.name=data", f"task.path={data}", "prompts.solved_pass_rate=null"]
    fork_run(source.path, Path("of-data"), 4, task)
    parent, solved = tmp_path / "of-data", "prompts.solved_pass_rate=0.9"
    for key in ("max_new_tokens=16", "context_tokens=4000"):
        with pytest.raises(RunConflictError, match=r"the longest prompt .* changes.*solved_pass_rate=null"):
            fork_run(parent, Path("new"), 4, [f"rollout.{key}", solved])
    fork_run(parent, Path("seeded"), 4, ["run.seed=5", solved])
    fork_run(source.path, Path("generated"), 4, ["rollout.max_new_tokens=16", solved])


@pytest.mark.parametrize("kind", ["batches/000001.zarr.zip", "checkpoints/000004"])
def test_what_is_damaged_is_not_taken_over(tmp_path: Path, kind: str) -> None:
    source = whole_run(tmp_path)
    damage(source.path / kind)
    with pytest.raises(StoreError, match="cannot be forked at step 4"):
        fork_run(source.path, Path("new"), 4)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("linked", [0, 1])
def test_a_checkpoint_that_the_parent_deletes_meanwhile_leaves_no_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: int
) -> None:
    """A run that goes on keeps its newest checkpoints alone. Nothing of the folder is found then, or half of it."""
    source = whole_run(tmp_path)
    checkpoint, link, calls = source.checkpoints / "000002", fork._link, 0

    def prune() -> None:
        if checkpoint.exists():
            remove_folder(checkpoint)

    def linking(old: Path, new: Path) -> None:
        nonlocal calls
        if checkpoint in old.parents:
            calls += 1
            if calls > linked:
                prune()
        link(old, new)

    monkeypatch.setattr(fork, "_link", linking)
    with pytest.raises(StoreError, match=r"has no checkpoint of step 2; there are: 4 \(checkpoint.keep\)"):
        fork_run(source.path, Path("new"), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_fork_without_its_checkpoint_is_not_begun(tmp_path: Path) -> None:
    """It would train the steps of its parent again."""
    fork_run(whole_run(tmp_path).path, Path("new"), 4)
    run = RunDirectory(tmp_path / "new")
    go_on_with(run, run.recipe())
    remove_folder(run.checkpoints / "000004")
    with pytest.raises(StoreError, match="is a fork at step 4, and holds no checkpoint of that step"):
        go_on_with(run, run.recipe())


def test_without_hard_links_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, link = whole_run(tmp_path), os.link

    def refuses(old: Path, new: Path) -> None:
        if str(source.path) in str(old):
            raise OSError(errno.EXDEV, "another device")
        link(old, new)

    monkeypatch.setattr(os, "link", refuses)
    fork_run(source.path, Path("new"), 4)
    assert (tmp_path / "new/batches/000001.zarr.zip").stat().st_nlink == 1
    assert check_history(tmp_path / "new")["damaged"] == []


@pytest.mark.parametrize(
    ("step", "overrides", "error", "said"),
    [
        (3, [], StoreError, "has no checkpoint of step 3; there are: 2, 4"),
        (4, ["model.path=other"], RunConflictError, "model.path: m → other"),
        (4, ["run.steps=3"], RunConflictError, "raise it"),
        (2, ["schedule.kind=staged", "schedule.updates_per_stage=4"], RunConflictError, "within a stage of 4 updates"),
        (4, ["task.min_digits=5", "prompts.solved_pass_rate=0.9"], RunConflictError, "solved_pass_rate=null"),
        (4, ["run.seed=5", "prompts.solved_pass_rate=0.9"], RunConflictError, "run.seed changes, and with it"),
    ],
)
def test_what_no_checkpoint_carries_is_refused(
    tmp_path: Path, step: int, overrides: list[str], error: type[Exception], said: str
) -> None:
    source = whole_run(tmp_path)
    with pytest.raises(error, match=said) as refused:
        fork_run(source.path, Path("new"), step, overrides)
    assert "\n" not in str(refused.value)
    with pytest.raises(RunConflictError, match="exists already"):
        fork_run(source.path, source.path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
