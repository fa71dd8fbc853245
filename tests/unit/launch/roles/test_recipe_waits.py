"""Which recipe of a run a role waits for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from launch.roles import lifecycle
from launch.roles.collector import run_collector
from launch.roles.lifecycle import wait_for_data, wait_for_recipe
from launch.run.waiting import Stop
from pipeline.config.loader import changed_keys, load_recipe
from pipeline.config.recipe import Recipe
from pipeline.data.epochs import claim, epoch_folder, newest
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import newest_recipe_file
from pipeline.errors import DeadlineExceededError, RecipeError
from pipeline.resume import go_on_with
from pipeline.tasks.data import with_digest
from tests.support.runs import make_prompts
from tests.support.whole_runs import finish, whole_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A finished run of 8 steps."""
    run = whole_run(tmp_path, committed=8, published=8, saved=(8,), policies=(8,))
    finish(run)
    return run


@pytest.fixture
def longer(run: RunDirectory, tmp_path: Path) -> Path:
    """The recipe of a run that gets more steps."""
    recipe = run.recipe()
    path = tmp_path / "longer.yaml"
    path.write_text(recipe.model_copy(update=dict(run=recipe.run.model_copy(update=dict(steps=16)))).to_yaml())
    return path


def test_without_one_that_is_given_any_will_do(run: RunDirectory) -> None:
    frozen = wait_for_recipe(run, Stop())
    assert (frozen.recipe, frozen.path.name) == (run.recipe(), "recipe.yaml")


def test_the_one_that_the_learner_is_given_is_waited_for(
    run: RunDirectory, longer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "RECIPE_DEADLINE_S", 0.0)
    with pytest.raises(DeadlineExceededError, match=r"waited 0 s for .* to go by .*longer\.yaml"):
        wait_for_recipe(run, Stop(), longer)
    monkeypatch.setattr(lifecycle, "RECIPE_DEADLINE_S", 60.0)
    learner = threading.Timer(0.5, go_on_with, [run, load_recipe(longer)])
    learner.start()
    frozen = wait_for_recipe(run, Stop(), longer)
    assert (frozen.recipe.run.steps, frozen.path.name) == (16, "000001.yaml")
    assert not run.is_finished(), "it would end"
    epoch = claim(run.path, "engine", 0, recipe=frozen.path.name)
    learner.join()
    assert not epoch.is_superseded()


def test_a_role_that_began_with_the_old_one_would_end(run: RunDirectory, longer: Path) -> None:
    """What `--recipe` spares it: a run that is finished, and that the learner is about to go on with."""
    assert run_collector(run, Stop()) == 0
    go_on_with(run, load_recipe(longer))
    assert newest_recipe_file(run.path).name == "000001.yaml"
    assert not run.is_finished()


def test_data_that_was_mended_before_the_first_batch_is_waited_for_by_who_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner freezes the digest of what is there; engines, which read no data, need not begin again."""
    monkeypatch.setattr(lifecycle, "RECIPE_DEADLINE_S", 0.0)
    prompts = make_prompts(tmp_path / "prompts.jsonl")
    data = dict(
        run=dict(name="x", root=str(tmp_path), steps=1),
        model=dict(path="m"),
        task=dict(name="data", path=str(prompts), reward="match"),
        evaluation=dict(prompts=1),
    )
    given, recipe, run = tmp_path / "given.yaml", Recipe.model_validate(data), RunDirectory(tmp_path / "x")
    given.write_text(recipe.to_yaml())

    def learner() -> None:
        go_on_with(run, with_digest(load_recipe(given), run))

    learner()
    for wait in (wait_for_recipe, wait_for_data):
        assert changed_keys(recipe, wait(run, Stop(), given).recipe).keys() == {"task.sha256"}
    good = prompts.read_text()
    prompts.write_text("".join(reversed(prompts.read_text().splitlines(keepends=True))))
    engine = claim(run.path, "engine", 0, recipe=wait_for_recipe(run, Stop(), given).path.name)
    assert wait_for_data(run, Stop(), given).path.name == "recipe.yaml", "the deadline: its task says what differs"
    with pytest.raises(RecipeError, match="is not the data of this run"):
        run_collector(run, Stop(), given)
    assert newest(epoch_folder(run.path, "engine", 0)) == engine.number
    monkeypatch.setattr(lifecycle, "RECIPE_DEADLINE_S", 60.0)
    monkeypatch.setattr(lifecycle, "DATA_POLL_S", 0.1)
    other = prompts.read_text()
    put_back = threading.Timer(0.5, prompts.write_text, [good])
    put_back.start()
    assert wait_for_data(run, Stop(), given).path.name == "recipe.yaml"
    assert prompts.read_text() == good
    put_back.join()
    prompts.write_text(other)
    collector = claim(run.path, "collector", recipe="recipe.yaml")
    learner()
    assert (engine.is_superseded(), collector.is_superseded()) == (False, True)
    assert wait_for_data(run, Stop(), given).path.name == "000001.yaml"
    learner()
    assert not engine.is_superseded()
