"""Keep the recipes that a run went by, and the format of its directory.

    RUN/FORMAT                 the layout of the directory: only the version of Even Keel with its number reads the run
    RUN/recipe.yaml            what the run began with, every default spelled out; never rewritten
    RUN/recipes/000001.yaml    what a later start changed it to, whole; its first line says from which step on

The newest file is the recipe that the run goes by. A file is created exclusively, with its checksum, so a start that is
killed has changed everything or nothing.
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
    """A recipe that a run went by."""

    first_step: int
    """Steps from it on are trained by it: no checkpoint and no published version has learned from them before."""
    first_batch: int
    """Batches from it on are sampled by it, and evaluations before them are due by it."""
    recipe: Recipe
    path: Path

    @property
    def sha256(self) -> str:
        """Digest of the file, which is never changed: batches name the recipe that they were sampled by."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def recipe_file(run: Path) -> Path:
    """Return the recipe that the run began with."""
    return run / "recipe.yaml"


def newest_recipe_file(run: Path) -> Path:
    """Return the recipe that the run goes by."""
    return [recipe_file(run), *_later(run)][-1]


def recipe_in_force(run: Path) -> RecipeInForce:
    """Return the recipe that the run goes by, and from where on. Raises StoreError when there is none or when another
    version of Even Keel made the run, RecipeError when a file was damaged."""
    return _read(run, newest_recipe_file(run))


def all_recipes(run: Path) -> list[RecipeInForce]:
    """Return every recipe that the run went by, in order. Raises as `recipe_in_force`."""
    return [_read(run, path) for path in (recipe_file(run), *_later(run))]


def recipe_of_step(recipes: Sequence[RecipeInForce], step: int) -> Recipe:
    """Return the one of `all_recipes` that `step` was trained by."""
    return [one.recipe for one in recipes if one.first_step <= step][-1]


def begin_recipe(run: Path, recipe: Recipe) -> None:
    """Store the recipe that a run begins with, unless it has one: of two that start at once, one wins."""
    make_folder(run)
    if not recipe_file(run).exists():
        with suppress(FileExistsError):
            create_sealed(run / "FORMAT", f"{RUN_FORMAT}\n")  # first: a recipe without it is refused
        with suppress(FileExistsError):
            create_sealed(recipe_file(run), recipe.to_yaml())


def refuse_another_recipe(run: Path, begun: Recipe, recipe: Recipe) -> None:
    """Raise RunConflictError, which names the keys, when a run that goes by `begun` is given another recipe."""
    if difference := [f"{key}: {change}" for key, change in changed_keys(begun, recipe).items()]:
        raise RunConflictError(
            f"{run} was started with another recipe ({'; '.join(difference)}); "
            "give the run another run.name or restore the values"
        )


def add_recipe(run: Path, recipe: Recipe, *, first_step: int, first_batch: int) -> None:
    """Store the recipe that the run goes by from now on. Raises RunConflictError when another start was first."""
    path = run / "recipes" / f"{len(_later(run)) + 1:06d}.yaml"
    make_folder(path.parent)
    try:
        create_sealed(path, f"# from step {first_step}, batch {first_batch}\n{recipe.to_yaml()}")
    except FileExistsError:
        raise RunConflictError(f"another start of {run} has just written {path}; give the command again") from None


def adopt_recipes(run: Path, recipes: Sequence[RecipeInForce]) -> None:
    """Give a run the recipes that another one went by. What it has of them stays. Raises RunConflictError where
    that differs."""
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
            "000001.yaml on; put back a copy of what is missing"
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
"""Raise it when recipe keys, metrics or files change their names, so that a run that was begun before cannot go on.
Batch files have a schema version of their own (pipeline.data.batch_format)."""

_FORMAT_BYTES = 1000


def check_format(run: Path) -> None:
    """Raise StoreError unless this version of Even Keel made the run, or one with the same RUN_FORMAT."""
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
