"""A run goes on with the data that it began with, or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.recipe import Recipe
from pipeline.config.task_sections import DataTask
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError, RunConflictError
from pipeline.resume import go_on_with
from pipeline.tasks import build_task
from pipeline.tasks.data import check_template, digest, with_digest
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer

LINES = [f'{{"prompt": "{number}=", "answer": "1"}}\n' for number in range(60)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "p.jsonl").write_text("".join(LINES))
    return tmp_path / "p.jsonl"


def recipe_of(path: Path, **task: Any) -> Recipe:
    data = dict(name="data", path=path, **task)
    return Recipe.model_validate(dict(run=dict(name="r", steps=1), model=dict(path=path.parent), task=data))


def begin(recipe: Recipe) -> Recipe:
    """As `evenkeel train` does it."""
    run = RunDirectory(recipe.model.path / "run")
    recipe = with_digest(recipe, run)
    build_task(recipe.task, 0)
    return run.freeze(recipe)


def begin_and_sample(recipe: Recipe) -> Recipe:
    """A run of one batch: from then on it is bound to its data."""
    frozen = begin(recipe)
    (RunDirectory(recipe.model.path / "run").batches / "000000.zarr.zip").touch()
    return frozen


def test_of_one_file_it_is_what_sha256sum_gives(path: Path) -> None:
    assert isinstance(task := recipe_of(path).task, DataTask)
    assert digest(task) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_same_data_goes_on(path: Path) -> None:
    first = begin(recipe_of(path))
    assert isinstance(first.task, DataTask)
    assert first.task.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert begin(recipe_of(path)) == first
    assert RunDirectory(path.parent / "run").recipe() == first


@pytest.mark.parametrize(
    "lines",
    [LINES[::-1], LINES[:-1], [*LINES, LINES[0]], [line.replace("1", "2") for line in LINES]],
    ids=["turned round", "cut", "longer", "other answers"],
)
def test_other_data_is_refused(path: Path, lines: list[str]) -> None:
    begin_and_sample(recipe_of(path))
    path.write_text("".join(lines), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"p\.jsonl is not the data of this run \(sha256 .*; put it back"):
        begin(recipe_of(path))
    path.write_text("".join(LINES), encoding="utf-8")
    begin(recipe_of(path))


def test_a_run_without_a_batch_takes_the_data_as_it_is_now(path: Path) -> None:
    begin(recipe_of(path))
    path.write_text("".join(LINES[::-1]), encoding="utf-8")
    run = RunDirectory(path.parent / "run")
    go_on_with(run, with_digest(recipe_of(path), run))
    assert isinstance(task := run.recipe().task, DataTask)
    assert task.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_held_out_file_belongs_to_it(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "h.jsonl"
    other.write_text('{"prompt": "x", "answer": "1"}\n')
    begin_and_sample(recipe_of(path, held_out_path=other))
    other.write_text('{"prompt": "y", "answer": "1"}\n')
    with pytest.raises(RecipeError, match=r"p\.jsonl or .*h\.jsonl is not the data"):
        begin(recipe_of(path, held_out_path=other))


def test_a_digest_in_the_recipe_holds_from_the_first_start_on(path: Path) -> None:
    with pytest.raises(RecipeError, match="is not the data of this run"):
        begin(recipe_of(path, sha256="0" * 64))
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    assert begin(recipe_of(path, sha256=right)) == begin(recipe_of(path))
    with pytest.raises(RunConflictError, match=r"task\.path"):
        begin(recipe_of(path.rename(path.with_name("q.jsonl"))))


def test_a_run_of_before_goes_on_without(path: Path) -> None:
    run = RunDirectory(path.parent / "run")
    run.freeze(recipe_of(path))
    (run.batches / "000000.zarr.zip").touch()
    path.write_text("".join(LINES[::-1]), encoding="utf-8")
    assert begin(recipe_of(path)) == recipe_of(path)


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def tokenizer_of(folder: Path, template: str) -> Tokenizer:
    write_character_tokenizer(folder, "0123456789=")
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder)


def test_another_chat_template_is_refused(path: Path) -> None:
    run, tokenizer = RunDirectory(path.parent / "run"), tokenizer_of(path.parent, TEMPLATE)
    frozen = begin_and_sample(recipe_of(path, chat_template=True))
    check_template(frozen.task, tokenizer)
    again = with_digest(recipe_of(path, chat_template=True), run)
    assert again == frozen
    changed = tokenizer_of(path.parent, TEMPLATE + "!")
    with pytest.raises(RecipeError, match=r"the chat template of .* is not that of this run .*put it back"):
        check_template(with_digest(recipe_of(path, chat_template=True), run).task, changed)
