"""A start that changes the recipe: what it leaves behind, whom it ends, and what a kill in between does."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch.build.learner import build_rates
from launch.fork.fork import fork_run
from launch.verify.history import check_history
from pipeline import resume
from pipeline.config.recipe import Recipe
from pipeline.data import epochs
from pipeline.data.checksums import list_checksums, verify_folder, write_sealed_json
from pipeline.data.epochs import Epoch, claim
from pipeline.data.event_log import EventLog, read_events
from pipeline.data.files import remove_folder, remove_leftovers
from pipeline.data.run_directory import RunDirectory, unfenced
from pipeline.data.run_recipes import add_recipe, adopt_recipes, all_recipes, newest_recipe_file
from pipeline.errors import RunConflictError, StoreError, SupersededError
from pipeline.resume import changes_in_words, changes_to, go_on_with, note_changes, nothing_left
from tests.support.whole_runs import finish, whole_run


def changed(recipe: Recipe, **sections: dict[str, Any]) -> Recipe:
    data = recipe.model_dump(mode="json")
    for name, values in sections.items():
        data[name] = {**data[name], **values}
    return Recipe.model_validate(data)


def with_lr(recipe: Recipe, lr: float, **run: Any) -> Recipe:
    optimizer = recipe.learner.optimizer.model_dump() | dict(lr=lr)
    return changed(recipe, learner=dict(optimizer=optimizer), run=run)


def test_what_is_safe_is_recorded_with_the_step_and_the_batch_from_which_it_holds(tmp_path: Path) -> None:
    run = whole_run(tmp_path, committed=6, published=5, saved=(2, 4))
    first = run.recipe()
    second = changed(first, evaluation=dict(every=3), learner=dict(pipeline_parallel=2))
    changes = go_on_with(run, second)
    assert changes == {"evaluation.every": "2 → 3", "learner.pipeline_parallel": "1 → 2"}
    assert changes_in_words(run, changes).endswith(
        "goes on from step 5 with evaluation.every: 2 → 3; learner.pipeline_parallel: 1 → 2"
    )
    assert run.recipe() == second
    text = newest_recipe_file(run.path).read_text()
    assert text.startswith("# from step 5, batch 6\n"), "5 is published, 6 are sampled"
    assert go_on_with(run, second) == {}
    third = with_lr(second, 1.0)
    go_on_with(run, third)
    recipes = all_recipes(run.path)
    assert [one.recipe for one in recipes] == [first, second, third]
    assert [(one.first_batch, one.recipe.evaluation.every) for one in recipes] == [(0, 2), (6, 3), (6, 3)]
    assert check_history(run.path)["damaged"] == []


def test_every_change_has_one_event_also_when_its_start_was_killed(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    log = EventLog(run.path, "supervisor-000001")
    note_changes(run, log)
    go_on_with(run, changed(run.recipe(), checkpoint=dict(every=7)))  # killed here
    for every in (7, 9, 9):
        go_on_with(run, changed(run.recipe(), checkpoint=dict(every=every)))
        note_changes(run, log)
    assert [
        (event["recipe"], event["step"], event["changes"]) for event in read_events(run.path, "recipe_changed")
    ] == [
        ("000001.yaml", 5, {"checkpoint.every": "20 → 7"}),
        ("000002.yaml", 5, {"checkpoint.every": "7 → 9"}),
    ]


def test_a_step_keeps_the_learning_rate_that_it_had(tmp_path: Path) -> None:
    run = whole_run(tmp_path, committed=6, published=5, saved=(2, 4), steps=8)
    old = run.recipe().learner.optimizer
    go_on_with(run, with_lr(run.recipe(), 0.25, steps=16))
    rates = build_rates(run)
    assert [span.total_steps for span in rates.spans] == [8, 16]
    assert [rates.at(step, step + old.warmup_steps) for step in range(7)] == [old.lr] * 5 + [0.25] * 2
    replay = RunDirectory(tmp_path / "replay")
    for _ in range(2):
        adopt_recipes(replay.path, all_recipes(run.path))
    assert build_rates(replay) == rates


def test_where_a_decay_may_end_counts_the_steps_that_were_taken(tmp_path: Path) -> None:
    """A fork takes 2 optimizer steps a batch from step 5 on; its parent took 1."""
    run = whole_run(tmp_path, committed=6, published=5, saved=(2, 4), steps=8)
    cosine = run.recipe().learner.optimizer.model_dump() | dict(decay="cosine")
    forked = changed(run.recipe(), learner=dict(optimizer=cosine, updates_per_batch=2))
    add_recipe(run.path, forked, first_step=5, first_batch=5)
    with pytest.raises(RunConflictError, match=r"decay_steps=11 .* or =27 "):
        changes_to(run, changed(forked, run=dict(steps=16)))


def test_what_is_not_safe_changes_nothing(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    before = sorted(run.path.rglob("*"))
    with pytest.raises(RunConflictError, match=r"rollout.group_size: 2 → 4 .*evenkeel fork"):
        go_on_with(run, changed(run.recipe(), rollout=dict(group_size=4), checkpoint=dict(every=7)))
    assert sorted(run.path.rglob("*")) == before


def test_a_finished_run_with_more_steps_is_not_finished(tmp_path: Path) -> None:
    """Nor is its model that of its end. What is left of that is whole."""
    run = whole_run(tmp_path, committed=8, published=8, saved=(8,), policies=(8,))
    finish(run)
    run.model.mkdir(exist_ok=True)
    for name in ("config.json", "manifest.json"):
        (run.model / name).write_text("{}")
    list_checksums(run.model)
    assert nothing_left(run, run.recipe())
    longer = changed(run.recipe(), run=dict(steps=16))
    assert not nothing_left(run, longer)
    go_on_with(run, longer)
    assert not run.is_finished()
    assert run.recipe().run.steps == 16
    assert not run.model_manifest.exists()
    assert (run.model / "config.json").exists()
    verify_folder(run.model, "")


def test_a_fork_without_a_checkpoint_needs_none_once_it_is_finished(tmp_path: Path) -> None:
    """With more steps it would train those of its parent again."""
    fork_run(whole_run(tmp_path).path, Path("new"), 4)
    run = RunDirectory(tmp_path / "new")
    remove_folder(run.checkpoints / "000004")
    with pytest.raises(StoreError, match="is a fork at step 4, and holds no checkpoint"):
        changes_to(run, run.recipe())
    finish(run)
    assert changes_to(run, run.recipe()) == {}
    with pytest.raises(StoreError, match="is a fork at step 4, and holds no checkpoint"):
        changes_to(run, changed(run.recipe(), run=dict(steps=16)))


def test_who_works_by_the_old_recipe_is_superseded(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    at_work = [claim(run.path, "collector"), claim(run.path, "learner"), claim(run.path, "engine", 3)]
    supervisor = claim(run.path, "supervisor")
    go_on_with(run.under(supervisor), changed(run.recipe(), checkpoint=dict(every=7)))
    for epoch in at_work:
        with pytest.raises(SupersededError):
            epoch.check()
    supervisor.check()


def test_who_has_waited_for_the_new_recipe_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles may read it before the start that has written it ends those that read the old one."""
    run, began = whole_run(tmp_path), list[Epoch]()
    add_recipe = resume.add_recipe

    def roles_begin(*given: Any, **where: Any) -> None:
        began.append(claim(run.path, "collector", recipe=newest_recipe_file(run.path).name))
        add_recipe(*given, **where)
        began.append(claim(run.path, "router"))
        began.append(claim(run.path, "engine", 3, recipe=newest_recipe_file(run.path).name))

    monkeypatch.setattr(resume, "add_recipe", roles_begin)
    go_on_with(run, changed(run.recipe(), checkpoint=dict(every=7)))
    assert [epoch.is_superseded() for epoch in began] == [True, True, False]


def test_who_begins_between_a_look_and_what_follows_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, began = whole_run(tmp_path), list[Epoch]()
    later = changed(run.recipe(), checkpoint=dict(every=7))
    claim(run.path, "engine", 3, recipe=newest_recipe_file(run.path).name)
    add_recipe(run.path, later, first_step=0, first_batch=0)
    look = epochs._recipe_of

    def begins_after(folder: Path, number: int) -> str | None:
        found = look(folder, number)
        if not began:
            began.append(claim(run.path, "engine", 3, recipe=newest_recipe_file(run.path).name))
        return found

    monkeypatch.setattr(epochs, "_recipe_of", begins_after)
    go_on_with(run, later)
    assert [epoch.is_superseded() for epoch in began] == [False]


def test_who_read_the_old_recipe_ends_also_where_the_start_that_changed_it_was_killed(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    later = changed(run.recipe(), checkpoint=dict(every=7))
    old = claim(run.path, "engine", 0, recipe=newest_recipe_file(run.path).name)
    add_recipe(run.path, later, first_step=0, first_batch=0)  # and no more
    new = claim(run.path, "engine", 1, recipe=newest_recipe_file(run.path).name)
    for _ in range(2):
        assert go_on_with(run, later) == {}
        assert old.is_superseded()
        assert not new.is_superseded()


def test_a_run_without_a_batch_is_not_bound(tmp_path: Path) -> None:
    run = whole_run(tmp_path, committed=0, published=0, saved=(), policies=(0,))
    run.write_evaluation(0, dict(pass_at_1=0.5))
    write_sealed_json(run.reference_file, dict(weights="of the other model"))
    other = changed(run.recipe(), model=dict(path="another"), rollout=dict(group_size=4))
    assert set(go_on_with(run, other)) == {"model.path", "rollout.group_size"}
    assert run.recipe() == other
    assert not run.is_published(), "version 0 was made of the other model"
    assert not run.policy_directory(0).exists()
    assert not run.evaluated_versions()
    assert not run.reference_file.exists()


def test_a_version_0_that_cannot_be_deleted_yet_is_gone_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, a file that an engine has open leaves its folder not empty."""
    run = whole_run(tmp_path, committed=0, published=0, saved=(), policies=(0,))

    def not_empty(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", not_empty)
        go_on_with(run, changed(run.recipe(), model=dict(path="another")))
    assert not run.policy_directory(0).exists()
    assert len(remove_leftovers(run.policies, unfenced)) == 1


def test_a_batch_that_is_committed_meanwhile_binds_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, run = (
        whole_run(tmp_path / "a"),
        whole_run(tmp_path / "b", committed=0, published=0, saved=(), policies=(0,)),
    )

    def commits(*_: object) -> None:
        shutil.copy(source.batches / "000000.zarr.zip", run.batches)

    monkeypatch.setattr(resume, "_end_other_starts", commits)
    with pytest.raises(RunConflictError, match=r"model.path"):
        go_on_with(run, changed(run.recipe(), model=dict(path="another")))
    assert run.policy_directory(0).exists()


@pytest.mark.parametrize("dies_in", ["reopen", "add_recipe"])
def test_a_start_that_is_killed_changed_everything_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: str
) -> None:
    run = whole_run(tmp_path, committed=8, published=8, saved=(8,), policies=(8,))
    finish(run)
    before, longer = run.recipe(), changed(run.recipe(), run=dict(steps=16))

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(resume, dies_in, dies)
        with pytest.raises(KeyboardInterrupt):
            go_on_with(run, longer)
    assert run.recipe() == before
    assert changes_to(run, longer) == {"run.steps": "8 → 16"}
    go_on_with(run, longer)
    assert [one.recipe.run.steps for one in all_recipes(run.path)] == [8, 16]


def test_more_steps_are_refused_once_the_short_last_stage_is_under_way(tmp_path: Path) -> None:
    """Its first batches were scored with weights that are gone, and the others never were."""
    staged = dict(kind="staged", updates_per_stage=4)
    run = whole_run(tmp_path, schedule=staged, committed=6, published=4, policies=(4,), saved=(4, 5), steps=6)
    with pytest.raises(RunConflictError, match=r"run.steps: 6 → 12, .* is under way"):
        changes_to(run, changed(run.recipe(), run=dict(steps=12)))
    shutil.rmtree(run.checkpoints / "000005")
    assert changes_to(run, changed(run.recipe(), run=dict(steps=12))) == {"run.steps": "6 → 12"}
