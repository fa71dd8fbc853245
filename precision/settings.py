"""Define the base of all recipe settings, and find the choices of a recipe by name."""

from __future__ import annotations

import inspect
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from precision.text import one_line


class Settings(BaseModel):
    """Base of recipe settings: frozen; refuses unknown keys, NaN, infinity, and true where a number is expected."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, data: Any) -> Any:
        for name, given in data.items() if isinstance(data, dict) else ():
            if isinstance(given, bool) and name in cls.model_fields:
                kind = cls.model_fields[name].annotation
                kinds = {getattr(one, "__origin__", one) for one in get_args(kind) or (kind,)}
                if kinds & {int, float} and bool not in kinds:
                    raise ValueError(f"{name} is {str(given).lower()}, expected a number")
        return data


def choices_in(package: str, base: type[Any]) -> dict[str, Any]:
    """Return name → class for every concrete subclass of `base` in `package` (one module, or a folder of them). A new
    class there is thereby a new choice of every recipe. Raises TypeError for a missing or repeated name."""
    found: dict[str, type[Settings]] = {}
    folder = getattr(import_module(package), "__path__", None)
    modules = [package] if folder is None else sorted(f"{package}.{info.name}" for info in iter_modules(folder))
    for module in modules:
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
    """Return the default of a class's field `name`. Raises TypeError without a default."""
    field = choice.model_fields.get("name")
    if field is None or not isinstance(field.default, str):
        raise TypeError(
            f'{choice.__name__} has no name; write in the class, for example: name: Literal["mine"] = "mine"'
        )
    return field.default


def problem_of(error: ValidationError) -> str:
    """Return the first problem that pydantic reports, and where, in one line."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return one_line(f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}", 300)
