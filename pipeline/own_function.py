"""A function of the user's that a recipe names, and which of what we offer it asks for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

from pipeline.errors import RecipeError
from precision.text import one_line


def own_function(key: str, name: str, given: Collection[str]) -> tuple[Callable[..., Any], frozenset[str]]:
    """The function `package.module:function` of a recipe's key, and the names among `given` that it takes: all of them
    with **rest. Raises RecipeError for what cannot be imported, and for one that needs something else."""
    module, _, function_name = name.partition(":")
    try:
        function = getattr(import_module(module), function_name)
        parameters = inspect.signature(function).parameters.values()
    except Exception as error:
        raise RecipeError(
            f"{key} {name} cannot be imported ({type(error).__name__}: {one_line(error, 200)}); correct it, or put the "
            "folder that holds it on PYTHONPATH"
        ) from error
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if unknown := [one for one in needed if one not in given]:
        raise RecipeError(f"{key} {name} asks for {', '.join(unknown)}, expected some of {', '.join(given)}")
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return function, frozenset(given if rest else (p.name for p in parameters))


def truth_of(said: object) -> bool | None:
    """What a function has said that says true or false, NumPy's too; None: something else, such as an array."""
    try:
        return bool(said) if said in (True, False) else None
    except Exception:  # noqa: BLE001 - an object whose comparison is somebody else's
        return None
