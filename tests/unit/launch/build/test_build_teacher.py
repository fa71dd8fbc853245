"""Before anything is started: a teacher must mean the same tokens as the student."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.build.teacher import check_teacher
from pipeline.config.loader import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.errors import ModelError, RecipeError
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer


def folder_of(path: Path, characters: str) -> Path:
    write_character_tokenizer(path, characters)
    (path / "config.json").write_text(json.dumps(dict(vocab_size=64, eos_token_id=0)))
    return path


def recipe_of(student: Path, teacher: Path) -> Recipe:
    return load_recipe(Path("distill"), [f"model.path={student}", f"distillation.path={teacher}"])


def test_the_same_tokens_in_another_folder_will_do(tmp_path: Path) -> None:
    student, teacher = (folder_of(tmp_path / name, "0123=") for name in ("student", "teacher"))
    check_teacher(recipe_of(student, teacher), Tokenizer.load(student))


def test_other_tokens_are_refused_by_name(tmp_path: Path) -> None:
    student, teacher = folder_of(tmp_path / "student", "0123="), folder_of(tmp_path / "teacher", "0132=")
    with pytest.raises(RecipeError, match=r"another tokenizer than model\.path .*: token '2' is \d there and \d here"):
        check_teacher(recipe_of(student, teacher), Tokenizer.load(student))


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    student = folder_of(tmp_path / "student", "0123=")
    with pytest.raises(ModelError, match=r"distillation\.path .*nothing has no config\.json"):
        check_teacher(recipe_of(student, tmp_path / "nothing"), Tokenizer.load(student))
