"""Recipe files: YAML in, a checked Recipe out; every refusal is a RecipeError of one line.

    load_recipe(path, overrides)     file ◀─over─ the file it `extends` …, then `--set section.key=value`

A program may give what a file would hold as a mapping.

A file may name another one in `extends:`, by its path relative to the file or, where no such file lies beside it, by
the name of a shipped recipe. Then it holds only what differs. `taken_from` says which files were taken. A section
picks what its keys mean by `name`, `class` or `kind` (objective, advantage, schedule …). One that picks another than
the base replaces the base's section, in a file and by `--set` alike: settings of GRPO's clip mean nothing to P3O.
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
from precision.text import YamlError, did_you_mean, listed, one_line, parse_yaml, quoted

SHIPPED = Path(__file__).parents[1] / "recipes"
"""Recipes that come with the program, in an installed wheel as in the repository."""
_MOST_FILES = 16
"""Recipes that extend one another."""
_LONGEST_LIST = 120
"""Characters of a text that is shown as the list that it should be."""
_BEGIN_WITH = {"reference.coefficient": 0.001}
"""Keys without a default → a value to begin with."""
_MOST_SECTIONS = 16
"""Words of a key of `--set`, such as the three of learner.optimizer.lr."""


_TAGGED = {name for name, field in Recipe.model_fields.items() if isinstance(field.discriminator, str)}
"""Sections of several classes, of which pydantic names one behind the section where it reports a problem."""
_CHOICES: dict[str, tuple[str, ...]] = {
    name: (str(field.discriminator), "class") if name in _TAGGED else ("name", "class")
    for name, field in Recipe.model_fields.items()
    if name in _TAGGED or any(isinstance(part, Choice) for part in field.metadata)
}
"""Section → the keys by which it picks what its other keys mean."""


def load_recipe(
    path: Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    fill_in: Callable[[dict[str, Any]], None] | None = None,
) -> Recipe:
    """Read a recipe file, or the shipped recipe of that name (see `find_recipe`), or a mapping of sections as a file
    would hold, and apply `section.key=value` overrides (values are YAML). `fill_in` may add to the data what they lack.
    Raises RecipeError."""
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
    """Return `key=value` as `load_recipe` takes it, for a value that JSON can say, or a path."""
    return f"{key}={json.dumps(value, default=str, ensure_ascii=False)}"  # YAML knows no halves of characters


def overridden_keys(overrides: Sequence[str]) -> list[str]:
    """Return `section.key` of all that the overrides say, also of what they say as the mapping of a section. Raises
    RecipeError."""
    data: dict[str, Any] = {}
    for override in overrides:
        _apply_override(data, override)
    return list(_flatten(data))


def find_recipe(path: Path) -> Path:
    """Return the path itself, or the file of a shipped recipe where `path` is only a name, such as `demo`, and no
    file."""
    return path if _is_file(path) else _shipped(str(path)) or path


def taken_from(path: Path) -> str:
    """Return which files a recipe was read from, in one line: `mine.yaml, which extends the shipped grpo.yaml`. Raises
    RecipeError."""
    files = _read(find_recipe(path), ())[1]
    return ", which extends ".join(
        f"the shipped {file.name}" if file.parent == SHIPPED else str(file) for file in files
    )


def _is_file(path: Path) -> bool:
    """False also for what no file can be called."""
    try:
        return path.is_file()
    except OSError:
        return False


def _shipped(name: str) -> Path | None:
    """Return the file of the shipped recipe of that name, which may end in `.yaml`."""
    path = SHIPPED / f"{name.removesuffix('.yaml')}.yaml"
    return path if path.parent == SHIPPED and _is_file(path) else None


def recipe_from(data: dict[str, Any], *, source: str) -> Recipe:
    """Validate plain data. Raises RecipeError naming `source` and every offending key."""
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
    """Return the data of a file over that of the file it extends, and these files."""
    try:
        data = parse_yaml(path.read_bytes())
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
    """Return the data of the file `path` over that of the file it extends, and these files."""
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
    """Return `changes` over `base`, key by key; a section that picks another kind of thing replaces the base's
    whole."""
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
        if node.get(section) is None:  # a resolved recipe says null of a section that it does not have
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
    """Return what is wrong, mostly one thing; of a section that there is not, that of each of its keys."""
    parts = [named(part) for part in detail["loc"]]
    if len(parts) > 1 and parts[0] in _TAGGED:
        del parts[1]  # which of the classes of a section it was; the recipe's key has no such part
    where, kind = ".".join(parts) or "recipe", detail["type"]
    if kind == "extra_forbidden":
        return [f"unknown key {line}" for line in all_meant_by(where, detail["input"])]
    if kind.startswith("union_tag"):
        # A section that picks what its keys mean, and picks nothing that there is.
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
    """Return what was expected, and how it is written, where pydantic speaks of Python's types; None: its words will
    do."""
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
