"""The base of everything that a recipe can set, and the registry of what it can choose from by name."""

from __future__ import annotations

import inspect
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen; unknown keys, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def choices_in(package: str, base: type[Any]) -> dict[str, Any]:
    """Name → class, for every concrete subclass of `base` that a module of `package` defines, in order of the modules.

    A new file in the package is thereby a new choice of every recipe. Raises TypeError for a class without a name, and
    for two of the same name.
    """
    found: dict[str, type[Settings]] = {}
    for module in sorted(f"{package}.{info.name}" for info in iter_modules(import_module(package).__path__)):
        for thing in vars(import_module(module)).values():
            if not (isinstance(thing, type) and issubclass(thing, base)) or inspect.isabstract(thing):
                continue
            if thing.__module__ == module:
                name = name_of(thing)
                if name in found:
                    raise TypeError(f"{found[name].__module__} and {module} both define {name!r}; rename one")
                found[name] = thing
    return found


def name_of(choice: type[Settings]) -> str:
    """The default of its field `name`. Raises TypeError without one."""
    field = choice.model_fields.get("name")
    if field is None or not isinstance(field.default, str):
        raise TypeError(
            f'{choice.__name__} has no name; write in the class, for example: name: Literal["mine"] = "mine"'
        )
    return field.default
