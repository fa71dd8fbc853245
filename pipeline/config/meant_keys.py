"""Suggest the recipe key that an unknown key means: a similar key, or the key for a word of another trainer."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.config.recipe import Recipe
from precision.text import LONGEST_WORD, parse_yaml, quoted

_UNKNOWN = "`evenkeel recipe --schema` lists the known ones"
_EVERYWHERE = frozenset(("class", "name", "path"))
"""Keys of many sections, whose names alone do not show which section was meant."""


@cache
def other_words() -> tuple[dict[str, str], dict[str, str]]:
    """Return other trainers' words → the key here, and words without a key here → the reason."""
    table = parse_yaml(Path(__file__).with_name("other_words.yaml").read_bytes())
    here, not_here = (
        {word: meaning for meaning, words in table[part].items() for word in words.split()}
        for part in ("here", "not_here")
    )
    return here, not_here


def meant_by(unknown: str) -> str:
    """Return a hint about an unknown `section.key`: the key that was meant, why there is none, or where to look."""
    known, (here, not_here) = known_keys(), other_words()
    *parents, leaf = unknown.split(".")
    section = parents[0] if parents else ""
    if choices := known.get(unknown):
        return f"only {section} {', '.join(sorted(choices))} has it; choose that, or leave the key out"
    if (section or leaf) == "extends":
        return "a recipe file extends another one, by its first line; give that file, or the other recipe itself"
    if word := here.get(".".join(unknown.split(".")[-2:])) or here.get(leaf):
        own = f"{section}.{word.rpartition('.')[2]}"
        return f"here it is {own if own in known else word}"
    for part in (leaf, *reversed(parents)):
        words = part.split("_")
        ends = ["_".join(words[:length]) for length in range(len(words), 0, -1)]
        ends += ["_".join(words[begin:]) for begin in range(1, len(words))]
        if part not in Recipe.model_fields and (found := [end for end in ends if end in not_here]):
            return not_here[found[0]]
    same = sorted(key for key in known if key.rpartition(".")[2] == leaf and leaf not in _EVERYWHERE)
    meant = [key for key in same if not parents or key.startswith(f"{section}.")]
    if not meant and len(unknown) <= LONGEST_WORD:
        alike = [key for key in known if key.count(".") == len(parents)]
        meant = get_close_matches(unknown, alike, n=1, cutoff=0.85)
    if meant:
        return f"did you mean {' or '.join(meant[:3])}?"
    if len(same) == 1 and section in Recipe.model_fields:
        return f"{leaf} is a key of {same[0].rpartition('.')[0]}"
    return _UNKNOWN


def all_meant_by(unknown: str, value: object) -> list[str]:
    """Return `KEY; hint` for an unknown key, or a hint for each key of another trainer's section."""
    told = meant_by(unknown)
    if isinstance(value, dict) and value and told == _UNKNOWN:
        return [line for key, below in value.items() for line in all_meant_by(f"{unknown}.{named(key)}", below)]
    return [f"{unknown}; {told}"]


def named(part: object) -> str:
    """Return a key or an index as a message shows it: quoted unless it is a short identifier."""
    text = str(part)
    return text if text.isidentifier() and len(text) <= 60 else quoted(part)


@cache
def known_keys() -> dict[str, frozenset[str]]:
    """Return section.key → the choices that have it; an empty set where it does not depend on a choice."""
    schema = Recipe.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]

    def keys(schema: dict[str, Any], prefix: str, choice: str) -> Iterator[tuple[str, str]]:
        if (reference := schema.get("$ref")) is not None:
            yield from keys(definitions[reference.rpartition("/")[2]], prefix, choice)
        for way in ("anyOf", "oneOf", "allOf"):
            for one in schema.get(way, ()):
                yield from keys(one, prefix, choice)
        properties = schema.get("properties", {})
        for name in ("name", "kind"):
            choice = str(properties.get(name, {}).get("const", choice))
        for key, body in properties.items():
            path = f"{prefix}.{key}".lstrip(".")
            yield path, choice
            yield from keys(body, path, choice)

    found: dict[str, set[str]] = {}
    for key, choice in keys(schema, "", ""):
        found.setdefault(key, set()).update([choice] if choice else [])
    return {key: frozenset(choices) for key, choices in found.items()}
