"""Read recipe files: YAML in, a checked Recipe out; every refusal is a RecipeError of one line.

    load_recipe(path, overrides)     file ◀─over─ the file it `extends` …, then `--set section.key=value`

A program may pass a mapping in place of a file.

A file may extend a base: `extends:` is a path relative to the file or, where no such file exists, the name of a shipped
recipe. The file then holds only what differs. In some sections (objective, advantage, schedule …) `name`, `class` or
`kind` chooses the meaning of the other keys. If a file or `--set` chooses otherwise than the base, its section replaces
the base's section: settings of GRPO's clip mean nothing to P3O.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config.choice import UNKNOWN_OPTION, Choice
from pipeline.config.meant_keys import all_meant_by, named
from pipeline.config.recipe import Recipe
from pipeline.config.task_sections import FUNCTION
from pipeline.errors import RecipeError
from precision.text import YamlError, did_you_mean, listed, one_line, parse_yaml, quoted, read_yaml

SHIPPED = Path(__file__).parents[1] / "recipes"
"""Folder of the shipped recipes, in an installed wheel as in the repository."""
_MOST_FILES = 16
"""Most recipes that extend one another."""
_LONGEST_LIST = 120
"""Most characters of a text that an error shows as the list that it should be."""
_BEGIN_WITH = {"reference.coefficient": 0.001}
"""Key without a default → a value to begin with."""
_MOST_SECTIONS = 16
"""Most words of a key of `--set`; learner.optimizer.lr has three."""


_TAGGED = {name for name, field in Recipe.model_fields.items() if isinstance(field.discriminator, str)}
"""Sections of several classes; pydantic adds the class to the place of an error in them."""
_CHOICES: dict[str, tuple[str, ...]] = {
    name: (str(field.discriminator), "class") if name in _TAGGED else ("name", "class")
    for name, field in Recipe.model_fields.items()
    if name in _TAGGED or any(isinstance(part, Choice) for part in field.metadata)
}
"""Section → the keys that choose the meaning of its other keys."""


def load_recipe(
    path: Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    fill_in: Callable[[dict[str, Any]], None] | None = None,
) -> Recipe:
    """Read a recipe from a file, by the name of a shipped recipe (see `find_recipe`) or from a mapping of sections, and
    apply `section.key=value` overrides (values are YAML). `fill_in` may add missing data. Raises RecipeError."""
    source = "recipe" if isinstance(path, Mapping) else str(path)
    if isinstance(path, Mapping):
        data = _extended(copy.deepcopy(dict(path)), Path(source), ())[0]
    else:
        data = _read(find_recipe(path), ())[0]
    for override in sorted(overrides, key=lambda text: not _is_choice(text.partition("=")[0])):
        _apply_override(data, override)
    if fill_in is not None:
        fill_in(data)
    return recipe_from(data, source=source)


def override_of(key: str, value: object) -> str:
    """Return `key=value` as `load_recipe` takes it, for a path or a value that JSON can hold."""
    return f"{key}={json.dumps(value, default=str, ensure_ascii=False)}"  # YAML has no surrogate pairs


def overridden_keys(overrides: Sequence[str]) -> list[str]:
    """Return `section.key` of every value that the overrides set, also inside mappings. Raises RecipeError."""
    data: dict[str, Any] = {}
    for override in overrides:
        _apply_override(data, override)
    return list(_flatten(data))


def find_recipe(path: Path) -> Path:
    """Return the path itself, or the file of a shipped recipe where `path` is no file but its name, such as `demo`."""
    return path if _is_file(path) else _shipped(str(path)) or path


def taken_from(path: Path) -> str:
    """Return the files of a recipe in one line: `mine.yaml, which extends the shipped grpo.yaml`."""
    files = _read(find_recipe(path), ())[1]
    return ", which extends ".join(
        f"the shipped {file.name}" if file.parent == SHIPPED else str(file) for file in files
    )


def _is_file(path: Path) -> bool:
    """Return whether the path is a file; False also for a text that cannot be a path."""
    try:
        return path.is_file()
    except OSError:
        return False


def _shipped(name: str) -> Path | None:
    path = SHIPPED / f"{name.removesuffix('.yaml')}.yaml"
    return path if path.parent == SHIPPED and _is_file(path) else None


def recipe_from(data: dict[str, Any], *, source: str) -> Recipe:
    """Return plain data as a recipe. Raises RecipeError naming `source` and every offending key."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        problems = [problem for detail in error.errors(include_url=False) for problem in _explain(detail)]
        raise RecipeError(f"{source}: {one_line(listed(problems), 480)}") from None


def changed_keys(ours: Recipe, theirs: Recipe) -> dict[str, str]:
    """Return `section.key` → `ours → theirs` for every key in which two recipes differ."""
    left, right = _flatten(ours.model_dump(mode="json")), _flatten(theirs.model_dump(mode="json"))
    return {
        key: f"{left.get(key)} → {right.get(key)}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    }


def _read(path: Path, extended_by: tuple[Path, ...]) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """Return the data of a file merged over the file that it extends, and all these files."""
    try:
        data = read_yaml(path)
    except OSError as error:
        by = f" (extended by {extended_by[-1]}; no shipped recipe has that name either)" if extended_by else ""
        names = sorted(recipe.stem for recipe in SHIPPED.glob("*.yaml"))
        raise RecipeError(
            f"cannot read recipe {one_line(path, 200)}{by}: {error.strerror}; give the path of a YAML file, or the "
            f"name of a shipped recipe ({', '.join(names)}){did_you_mean(path.name.removesuffix('.yaml'), names)}"
        ) from error
    except YamlError as error:
        raise RecipeError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        held = "is empty" if data is None else f"holds {quoted(data)}"
        raise RecipeError(f"{path} {held}, expected sections such as run, model and task")
    return _extended(data, path, extended_by)


def _extended(
    data: dict[str, Any], path: Path, extended_by: tuple[Path, ...]
) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """Return the data of the file `path` merged over the file that it extends, and all these files."""
    base = data.pop("extends", None)
    if base is None:
        return data, (path,)
    if not isinstance(base, str):
        raise RecipeError(
            f"{path}: extends is {quoted(base)}, expected another recipe: its path relative to this one, or the name "
            "of a shipped one"
        )
    chain = (*extended_by, Path(os.path.realpath(path)))
    target = path.parent / base
    if not _is_file(target):
        target = _shipped(base) or target
    if Path(os.path.realpath(target)) in chain:
        raise RecipeError(f"{path}: extends {quoted(base)}, which extends this file again; break the circle")
    if len(chain) >= _MOST_FILES:
        raise RecipeError(f"{path}: it is the {len(chain)}th recipe that extends another; put some of them into one")
    below, files = _read(target, chain)
    return _merged(below, data), (path, *files)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` over it, key by key. A section with another choice replaces the base's section."""
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
    *sections, leaf = key.split(".")
    if not equals or not all((*sections, leaf)) or len(sections) >= _MOST_SECTIONS:
        raise RecipeError(
            f"--set {quoted(override)} is not section.key=value; for example --set learner.tensor_parallel=2"
        )
    node = data
    for section in sections:
        if node.get(section) is None:  # a resolved recipe has null for an absent section
            node[section] = {}
        node = node[section]
        if not isinstance(node, dict):
            raise RecipeError(
                f"--set {quoted(override)}: {quoted(section)} is a value, not a section; leave out what follows it"
            )
    try:
        parsed = parse_yaml(value)
    except YamlError as error:
        raise RecipeError(f"--set {quoted(override)}: the value: {error}") from None
    if _is_choice(key) and node.get(leaf) != parsed:
        node.clear()
    node[leaf] = parsed


def _is_choice(key: str) -> bool:
    section, _, leaf = key.partition(".")
    return leaf in _CHOICES.get(section, ())


def _explain(detail: Any) -> list[str]:
    """Return the problems in one pydantic error: mostly one, but one for each key of an unknown section."""
    parts = [named(part) for part in detail["loc"]]
    if len(parts) > 1 and parts[0] in _TAGGED:
        del parts[1]  # the class of the section, which is no part of the recipe's key
    where, kind = ".".join(parts) or "recipe", detail["type"]
    if kind == "extra_forbidden":
        return [f"unknown key {line}" for line in all_meant_by(where, detail["input"])]
    if kind.startswith("union_tag"):
        # The section's choice is missing or unknown.
        key, tag = detail["ctx"]["discriminator"].strip("'"), detail["ctx"].get("tag")
        section: Any = Recipe.model_fields[where].annotation
        allowed = [str(one.model_fields[key].annotation.__args__[0]) for one in section.__args__]
        got = "is missing" if tag is None else f"is {quoted(tag)}"
        meant = did_you_mean(str(tag), allowed)
        return [f"{where}.{key} {got}, expected one of {', '.join(allowed)}{meant}"]
    message = _in_words(where, detail) or one_line(str(detail["msg"]).removeprefix("Value error, "), 400)
    if kind == UNKNOWN_OPTION:
        return [f"unknown key {where}; {message}"]
    got = "" if kind in ("missing", "value_error") else f", got {quoted(detail['input'])}"
    if kind == "literal_error" and isinstance(detail["input"], str):
        got += did_you_mean(detail["input"], re.findall(r"'([^']*)'", detail["ctx"]["expected"]))
    return [f"{where}: {message}{got}"]


def _in_words(where: str, detail: Any) -> str | None:
    """Return the expected value in the recipe's terms, or None where pydantic does not speak of Python types."""
    kind, got = detail["type"], detail["input"]
    if kind == "missing":
        return "is required" + (
            f"; {begin} is a value to begin with" if (begin := _BEGIN_WITH.get(where)) else "; set it"
        )
    if kind == "string_pattern_mismatch" and detail["ctx"]["pattern"] == FUNCTION:
        return "expected package.module:name, such as my_rewards:score"
    if kind == "string_pattern_mismatch" and where == "run.name":
        return "expected letters, digits, . _ and -, the first a letter or a digit; the folder goes into run.root"
    if kind in ("model_type", "model_attributes_type"):
        key = _CHOICES.get(where, ("",))[0] if where in _TAGGED else ""
        written = f"{{{key}: {got}}}" if key and isinstance(got, str) and got.isidentifier() else "{KEY: VALUE, …}"
        return f"expected a section: {written}"
    if kind == "tuple_type":
        words = (
            ", ".join(map(json.dumps, got.split())) if isinstance(got, str) and len(got) <= _LONGEST_LIST else "…, …"
        )
        return f"expected a list: [{words}]"
    if kind == "string_type":
        if isinstance(got, list) and len(got) == 1:
            return "expected text, not a list; leave out the brackets"
        return f'expected text; quote it: "{got}"' if isinstance(got, bool | int | float) else "expected text"
    if kind in ("int_parsing", "int_from_float", "int_type"):
        return "expected an integer"
    return "expected true or false" if kind.startswith("bool") else None
