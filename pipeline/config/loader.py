"""Recipe files: YAML in, a checked Recipe out; every refusal is a RecipeError of one line.

    load_recipe(path, overrides)     file ◀─over─ the file it `extends` …, then `--set section.key=value`

A file may name another one in `extends:`, by its path relative to the file or by the name of a shipped recipe. Then it
holds only what differs. A section picks what its keys mean by `name`, `class` or `kind` (objective, advantage, schedule
…). One that picks another than the base replaces the base's section, in a file and by `--set` alike: settings of GRPO's
clip mean nothing to P3O.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pipeline.config.choice import Choice
from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError

SHIPPED = Path(__file__).parents[1] / "recipes"
"""Recipes that come with the program, in an installed wheel as in the repository."""


def _choice_keys(field: FieldInfo) -> tuple[str, ...]:
    if any(isinstance(part, Choice) for part in field.metadata):
        return ("name", "class")
    return (field.discriminator,) if isinstance(field.discriminator, str) else ()


_CHOICES = {name: _choice_keys(field) for name, field in Recipe.model_fields.items()}
"""Section → the keys by which it picks what its other keys mean."""


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, or the shipped recipe of that name (see `find_recipe`), and apply `section.key=value`
    overrides (values are YAML). Raises RecipeError."""
    data = _read(find_recipe(path), ())
    for override in sorted(overrides, key=lambda text: not _is_choice(text.partition("=")[0])):
        _apply_override(data, override)
    return recipe_from(data, source=str(path))


def find_recipe(path: Path) -> Path:
    """The path itself, or the file of a shipped recipe where `path` is only a name, such as `demo`, and no file."""
    return path if path.is_file() else _shipped(str(path)) or path


def _shipped(name: str) -> Path | None:
    """The file of the shipped recipe of that name, which may end in `.yaml`."""
    path = SHIPPED / f"{name.removesuffix('.yaml')}.yaml"
    return path if path.parent == SHIPPED and path.is_file() else None


def recipe_from(data: dict[str, Any], *, source: str) -> Recipe:
    """Validate plain data. Raises RecipeError naming `source` and every offending key."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(_explain(detail) for detail in error.errors(include_url=False))
        raise RecipeError(f"{source}: {problems}") from None


def differing_keys(ours: Recipe, theirs: Recipe) -> list[str]:
    """`section.key: ours → theirs` for every key in which two recipes differ."""
    left, right = _flatten(ours.model_dump(mode="json")), _flatten(theirs.model_dump(mode="json"))
    return [
        f"{key}: {left.get(key)} → {right.get(key)}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    ]


def _read(path: Path, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    """The data of a file over that of the file it extends."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        by = f" (extended by {extended_by[-1]})" if extended_by else ""
        names = ", ".join(sorted(recipe.stem for recipe in SHIPPED.glob("*.yaml")))
        raise RecipeError(
            f"cannot read recipe {path}{by}: {error.strerror}; give the path of a YAML file, or the name of a shipped "
            f"recipe ({names})"
        ) from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path} holds {type(data).__name__}, expected sections such as run, model and task")
    base = data.pop("extends", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise RecipeError(
            f"{path}: extends is {base!r}, expected another recipe: its path relative to this one, or the name of a "
            "shipped one"
        )
    chain = (*extended_by, path.resolve())
    target = path.parent / base
    if not target.is_file():
        target = _shipped(base) or target
    if target.resolve() in chain:
        raise RecipeError(f"{path}: extends {base}, which extends this file again; break the circle")
    return _merged(_read(target, chain), data)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` over `base`, key by key; a section that picks another kind of thing replaces the base's whole."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            same = all(value.get(choice, below.get(choice)) == below.get(choice) for choice in _CHOICES.get(key, ()))
            value = _merged(below, value) if same else value
        merged[key] = value
    return merged


def _flatten(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        return {prefix: data}
    return {k: v for key, value in data.items() for k, v in _flatten(value, f"{prefix}.{key}".lstrip(".")).items()}


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set {override!r} is not key=value; for example --set learner.tensor_parallel=2")
    *sections, leaf = key.split(".")
    node = data
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise RecipeError(f"--set {override!r}: {section} is a value, not a section")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {override!r}: the value is not YAML") from error
    if _is_choice(key) and node.get(leaf) != parsed:
        node.clear()
    node[leaf] = parsed


def _is_choice(key: str) -> bool:
    section, _, leaf = key.partition(".")
    return leaf in _CHOICES.get(section, ())


def _explain(detail: Any) -> str:
    where = ".".join(str(part) for part in detail["loc"]) or "recipe"
    if detail["type"] == "extra_forbidden":
        return f"unknown key {where}; `evenkeel recipe --schema` lists the known ones"
    message = str(detail["msg"]).removeprefix("Value error, ")
    got = "" if detail["type"] in ("missing", "value_error") else f", got {detail['input']!r}"
    return f"{where}: {message}{got}"
