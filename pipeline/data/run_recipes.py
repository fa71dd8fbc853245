"""Store the recipes of a run, and the format of its directory.

    RUN/FORMAT                 the layout of the directory: only the version of Even Keel with its number reads the run
    RUN/recipe.yaml            the first recipe, every default spelled out; never rewritten
    RUN/recipes/000001.yaml    the whole recipe as changed by a later start; its first line names its first step

The newest file is the recipe in force. Files are created exclusively, with a checksum, so a killed start has changed
everything or nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.loader import changed_keys, recipe_from
from pipeline.config.recipe import Recipe
from pipeline.data.checksums import crc32, create_sealed, read_sealed, reason, seal, unseal
from pipeline.data.files import NUMBER, make_folder, read_at_most
from pipeline.errors import RecipeError, RunConflictError, StoreError
from precision.text import MOST_BYTES, YamlError, one_line, parse_yaml

_FILE = re.compile(rf"({NUMBER})\.yaml")
_HEAD = re.compile(r"# from step (\d{1,9}), batch (\d{1,9})\n")


@dataclass(frozen=True, kw_only=True)
class RecipeInForce:
    """A recipe of a run, with its first step and batch."""

    first_step: int
    """The first step trained by it: no earlier checkpoint or published version has learned from this step."""
    first_batch: int
    """The first batch sampled by it; evaluations before that batch are due by it."""
    recipe: Recipe
    path: Path

    @property
    def sha256(self) -> str:
        """Digest of the file, which never changes: batches name their recipe by it."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def recipe_file(run: Path) -> Path:
    """Return the path of the run's first recipe."""
    return run / "recipe.yaml"


def newest_recipe_file(run: Path) -> Path:
    """Return the path of the recipe in force."""
    return [recipe_file(run), *_later(run)][-1]


def recipe_in_force(run: Path) -> RecipeInForce:
    """Return the recipe in force. Raises StoreError for none or another RUN_FORMAT, and RecipeError for damage."""
    return _read(run, newest_recipe_file(run))


def all_recipes(run: Path) -> list[RecipeInForce]:
    """Return every recipe of the run, in order. Raises as `recipe_in_force`."""
    return [_read(run, path) for path in (recipe_file(run), *_later(run))]


def recipe_of_step(recipes: Sequence[RecipeInForce], step: int) -> Recipe:
    """Return the recipe in `all_recipes` by which `step` was trained."""
    return [one.recipe for one in recipes if one.first_step <= step][-1]


def begin_recipe(run: Path, recipe: Recipe) -> None:
    """Store the run's first recipe, unless it has one: of two starts at once, one wins."""
    make_folder(run)
    if not recipe_file(run).exists():
        with suppress(FileExistsError):
            create_sealed(run / "FORMAT", f"{RUN_FORMAT}\n")  # first: a recipe without it is refused
        with suppress(FileExistsError):
            create_sealed(recipe_file(run), recipe.to_yaml())


def refuse_another_recipe(run: Path, begun: Recipe, recipe: Recipe) -> None:
    """Raise RunConflictError, naming the keys, when a run that goes by `begun` is given another recipe."""
    if difference := [f"{key}: {change}" for key, change in changed_keys(begun, recipe).items()]:
        raise RunConflictError(
            f"{run} was started with another recipe ({'; '.join(difference)}); "
            "give the run another run.name or restore the values"
        )


def add_recipe(run: Path, recipe: Recipe, *, first_step: int, first_batch: int) -> None:
    """Store a new recipe in force. Raises RunConflictError when another start was first."""
    path = run / "recipes" / f"{len(_later(run)) + 1:06d}.yaml"
    make_folder(path.parent)
    try:
        create_sealed(path, f"# from step {first_step}, batch {first_batch}\n{recipe.to_yaml()}")
    except FileExistsError:
        raise RunConflictError(f"another start of {run} has just written {path}; give the command again") from None


def adopt_recipes(run: Path, recipes: Sequence[RecipeInForce]) -> None:
    """Give a run the recipes of another run. Raises RunConflictError where those that it already has differ."""
    begin_recipe(run, recipes[0].recipe)
    had = all_recipes(run)
    for one, wanted in zip(had, recipes, strict=False):
        refuse_another_recipe(run, one.recipe, wanted.recipe)
    for one in recipes[len(had) :]:
        add_recipe(run, one.recipe, first_step=one.first_step, first_batch=one.first_batch)


def _later(run: Path) -> list[Path]:
    folder = run / "recipes"
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = {int(match[1]): folder / name for name in names if (match := _FILE.fullmatch(name))}
    if sorted(found) != [*range(1, len(found) + 1)]:
        raise StoreError(
            f"{folder} holds {', '.join(path.name for _, path in sorted(found.items()))}, expected no gap from "
            "000001.yaml on; put back a copy of the missing file"
        )
    return [found[number] for number in sorted(found)]


def _read(run: Path, path: Path) -> RecipeInForce:
    if not os.path.lexists(recipe_file(run)):
        raise StoreError(
            f"{one_line(run, 300)} is not a run directory: it has no recipe.yaml; give one such as runs/NAME"
        )
    check_format(run)
    last_line = ""
    with suppress(OSError, ValueError):
        data = re.sub(rb"# crc32 [^\n]*\n?\Z", b"", read_at_most(path, MOST_BYTES)).removesuffix(b"\n") + b"\n"
        last_line = f"# crc32 {crc32(data)}"
    text = read_sealed(
        path,
        "a run goes by its recipe: put back a copy, or start a new run; if it was changed on purpose, its last line "
        f"must be: {last_line}",
    )
    try:
        data = parse_yaml(text)
    except YamlError as error:
        raise RecipeError(f"{path} is damaged ({error}); put back a copy of it, or start a new run") from None
    head = _HEAD.match(text)
    first_step, first_batch = map(int, head.groups()) if head else (0, 0)
    recipe = recipe_from(data, source=str(path))
    return RecipeInForce(first_step=first_step, first_batch=first_batch, recipe=recipe, path=path)


RUN_FORMAT = 7
"""Raise it when names of recipe keys, metrics or files change, so that older runs cannot resume. Batch files have a
separate schema version (pipeline.data.batch_format)."""

_FORMAT_BYTES = 1000


def check_format(run: Path) -> None:
    """Raise StoreError unless the run has this version's RUN_FORMAT."""
    path = run / "FORMAT"
    try:
        found = int(unseal(read_at_most(path, _FORMAT_BYTES)))
    except (FileNotFoundError, ValueError) as error:
        trouble = f"is damaged ({reason(error)})" if isinstance(error, ValueError) else "is missing"
        text = json.dumps(seal(f"{RUN_FORMAT}\n"))[1:-1]
        raise StoreError(
            f"{path} {trouble}; if this version of Even Keel made the run, write {text} into it, or else start a new "
            "run"
        ) from None
    if found != RUN_FORMAT:
        raise StoreError(
            f"{run} was made by {'an earlier' if found < RUN_FORMAT else 'a later'} version of Even Keel (run format "
            f"{found}, this version reads {RUN_FORMAT}); go on with that version, or start a new run under another "
            "run.name"
        )
