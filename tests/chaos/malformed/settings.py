"""`--set KEY=VALUE`: keys that are none, values of any kind, on shipped recipes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.loader import load_recipe
from tests.chaos.malformed.mutations import NASTY, judged_line
from tests.chaos.malformed.recipes import FILES
from tests.support.runs import evenkeel

COUNT = 600
IN_MAKE_TEST = 20


def prepare() -> None:
    """Imports what the tries need, and reads the keys of all recipes once."""
    evenkeel("recipe", "demo")
    for file in FILES:
        _keys(file.stem)


def attempt(seed: int, folder: Path) -> str:
    """Run `evenkeel recipe FILE --set …`."""
    rng = random.Random(f"settings/{seed}")
    recipe = rng.choice(FILES).stem
    given = [part for _ in range(rng.randint(1, 3)) for part in ("--set", _override(rng, recipe))]
    done = evenkeel("recipe", recipe, *given)
    if done.returncode == 0:
        return "ok"
    if done.returncode != 1 or not done.stderr.startswith("error: "):
        return f"{given!a}: status {done.returncode}: {done.stderr[:200]!a}"
    return judged_line(done.stderr.removesuffix("\n"))


def _override(rng: random.Random, recipe: str) -> str:
    keys = _keys(recipe)
    key = rng.choice(keys)
    how = rng.random()
    if how < 0.2:
        key = rng.choice(("", ".", "run", "run.", ".name", "a" * 3000, "a." * 3000, "run.name.x", "\ud800.x",
            "\x1b", "ü", f"{key}.x"))  # fmt: skip
    value = rng.choice(NASTY)
    text = value if isinstance(value, str) and rng.random() < 0.5 else yaml.safe_dump(value, default_flow_style=True)
    if how > 0.8:
        text = rng.choice(("[" * 4000, "9" * 5000, "&a [*a]", "!!python/name:os.system", "{", "*a", "a: b: c", "'",
            "%", "2001-99-99", "0b_"))  # fmt: skip
    return key + rng.choice(("=", "=", "=", "=", "", "==")) + text


@cache
def _keys(recipe: str) -> list[str]:
    return list(flatten(load_recipe(Path(recipe)).model_dump(mode="json")))


def flatten(data: Any, prefix: str = "") -> Iterator[str]:
    """`section.key` of every value."""
    if not isinstance(data, dict):
        yield prefix
        return
    for key, value in data.items():
        yield from flatten(value, f"{prefix}.{key}".lstrip("."))
