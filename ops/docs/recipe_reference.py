"""The page of all recipe keys, made from the recipe's own classes: `evenkeel recipe --schema` as people read it."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from typing import Any

from pipeline.config.algorithm import ADVANTAGES, CORRECTIONS, OBJECTIVES
from pipeline.config.recipe import Recipe

Schema = dict[str, Any]

_METHODS = {"objective": OBJECTIVES, "correction": CORRECTIONS, "advantage": ADVANTAGES}
_HEAD = """# Recipe keys

A recipe is one YAML file: these sections, with these keys. Only what has no default must be there. Unknown keys are
refused, with the one that was probably meant. `--set SECTION.KEY=VALUE` changes a key for one command,
`extends: OTHER` at the head of a file takes all keys of another recipe, and `evenkeel recipe FILE` shows what a recipe
comes to. This page is made from the code by `make docs`.
"""


def recipe_page() -> str:
    """The whole page, as Markdown."""
    schema = Recipe.model_json_schema()
    definitions: dict[str, Schema] = schema["$defs"]
    required = set(schema.get("required", ()))
    parts = [_HEAD]
    for section, body in schema["properties"].items():
        parts.append(f"## {section} {{ #{section} }}\n")
        if section in required:
            parts.append("Must be there.\n")
        parts += _section(section, body, definitions)
    return "\n".join(parts)


def _section(section: str, body: Schema, definitions: dict[str, Schema]) -> Iterator[str]:
    """One section, or each of its choices."""
    chosen = list(_choices(body, definitions))
    for definition, is_choice in chosen:
        prefix, properties = section, dict(definition.get("properties", {}))
        if is_choice:
            by = "kind" if "kind" in properties else "name"
            value = properties.pop(by, {}).get("const")
            if value is None:
                yield f"### {section}: a class of your own\n"
            else:
                yield f"### `{section}: {{{by}: {value}}}` {{ #{section}-{value} }}\n"
                prefix = f"{section}-{value}"
                yield _about_method(section, value)
        if text := definition.get("description"):
            yield f"{_shown(text)}\n"
        if properties:
            yield "\n".join(_table(prefix, definition | {"properties": properties}, definitions)) + "\n"


def _about_method(section: str, name: str) -> str:
    """Return the docstring of a method, that of its module where it stands alone: formula, paper, what is left open."""
    methods = _METHODS.get(section, {})
    method = methods.get(name)
    beside = [other for other in methods.values() if method is not None and other.__module__ == method.__module__]
    text = (
        inspect.getdoc(sys.modules[method.__module__] if len(beside) == 1 else method) if method is not None else None
    )
    return f"```text\n{text}\n```\n" if text else ""


def _choices(body: Schema, definitions: dict[str, Schema]) -> Iterator[tuple[Schema, bool]]:
    """The definitions that a section may have, and whether there are several."""
    found = [definition for definition in _objects(body, definitions) if definition.get("type") == "object"]
    for definition in found:
        yield definition, len(found) > 1


def _objects(body: Schema, definitions: dict[str, Schema]) -> Iterator[Schema]:
    if (reference := body.get("$ref")) is not None:
        yield definitions[reference.rpartition("/")[2]]
    for way in ("anyOf", "oneOf", "allOf"):
        for one in body.get(way, ()):
            yield from _objects(one, definitions)


def _table(prefix: str, definition: Schema, definitions: dict[str, Schema]) -> Iterator[str]:
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    yield from _rows(prefix, "", definition, definitions)


def _rows(prefix: str, path: str, definition: Schema, definitions: dict[str, Schema]) -> Iterator[str]:
    """A row a key; a section inside a section has its keys below its own, by their whole names."""
    required = set(definition.get("required", ()))
    for key, body in definition["properties"].items():
        name = f"{path}{key}"
        anchor = f'<a id="{prefix}.{name}"></a>'
        default = "needed" if key in required else _default(body)
        meaning = _cell(_shown(body.get("description", "")))
        yield f"| {anchor}`{name}` | {_cell(_kind(body, definitions))} | {default} | {meaning} |"
        named = body.get("additionalProperties")
        for below, inside in ((name, body), (f"{name}.NAME", named if isinstance(named, dict) else {})):
            for inner in _objects(inside, definitions):
                if inner.get("properties"):
                    yield from _rows(prefix, f"{below}.", inner, definitions)


def _default(body: Schema) -> str:
    if "default" not in body:
        return "its own"
    value = body["default"]
    if value is None or (isinstance(value, list) and not value):
        return "none"
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value, ensure_ascii=False)}`"


def _kind(body: Schema, definitions: dict[str, Schema]) -> str:
    """What a value may be, in words."""
    if "const" in body:
        return f"`{body['const']}`"
    if "enum" in body:
        return ", ".join(f"`{value}`" for value in body["enum"])
    if (reference := body.get("$ref")) is not None:
        inner = definitions[reference.rpartition("/")[2]]
        return "keys below" if inner.get("properties") else _kind(inner, definitions)
    for way in ("anyOf", "oneOf", "allOf"):
        if way in body:
            kinds = dict.fromkeys(_kind(one, definitions) for one in body[way])
            return " or ".join(kind for kind in kinds if kind != "nothing") if kinds else "anything"
    match body.get("type"):
        case "array":
            items = body.get("items") or next(iter(body.get("prefixItems", ())), {})
            return f"list of: {_kind(items, definitions)}"
        case "object":
            values = body.get("additionalProperties")
            return f"name → {_kind(values, definitions)}" if isinstance(values, dict) and values else "keys"
        case "boolean":
            return "`true`, `false`"
        case "integer":
            return f"whole number{_bounds(body)}"
        case "number":
            return f"number{_bounds(body)}"
        case "null":
            return "nothing"
        case "string":
            return "path" if body.get("format") == "path" else "text"
    return "anything"


def _bounds(body: Schema) -> str:
    low = _first(body, ("exclusiveMinimum", "above"), ("minimum", "from"))
    high = _first(body, ("exclusiveMaximum", "below"), ("maximum", "to"))
    return "".join(f" {bound}" for bound in (low, high) if bound)


def _first(body: Schema, *words: tuple[str, str]) -> str:
    return next((f"{word} {body[key]:g}" for key, word in words if key in body), "")


def _shown(text: str) -> str:
    """A docstring or description as Markdown that shows what it says: formulas hold characters that Markdown eats."""
    pieces = text.strip().split("`")
    pieces[::2] = [piece.replace("*", r"\*").replace("_", r"\_").replace("<", "&lt;") for piece in pieces[::2]]
    return "`".join(pieces)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())
