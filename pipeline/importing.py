"""Say how to install a missing package, and import the function that a recipe names.

On PyPI, the name `evenkeel` belongs to another project, so no message passes this name to pip.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.errors import RecipeError
from precision.text import one_line

_OURS = "evenkeel"


def pip_install(*distributions: str) -> str:
    """Return `pip install 'torch>=2.11' einops`, by the requirements of our package's core or first extra."""
    known = _requirements()
    return " ".join(["pip install", *(shlex.quote(known.get(canonicalize_name(one), one)) for one in distributions)])


@cache
def _requirements() -> dict[str, str]:
    """Return the requirement of each distribution, without markers for our extras."""
    try:
        lines = metadata.requires(_OURS) or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for one in map(Requirement, lines):
        extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
        found.setdefault(canonicalize_name(one.name), f"{one.name}{extras}{one.specifier}")
    return found


EXTRA_OF = {
    "einops": "learner",
    "megatron": "learner",
    "torch": "learner",
    "transformers": "learner",
    "math_verify": "rollout",
    "sglang": "rollout",
    "sglang_router": "rollout",
    "modelopt": "convert",
    "transformer_engine": "learner-gpu",
    "tensorboard": "export",
    "wandb": "export",
    "mcp": "mcp",
}
"""The extra of each package that a machine for planning and reading runs does not need."""
LEARNER = tuple(package for package, extra in EXTRA_OF.items() if extra == "learner")
DISTRIBUTIONS = {
    "megatron": ("megatron-core",),
    "math_verify": ("math-verify",),
    "sglang_router": ("sglang-router",),
    "modelopt": ("nvidia-modelopt",),
    "transformer_engine": ("transformer-engine", "transformer-engine-cu13"),
}
"""The distributions to install for a package, where they differ from its name."""


REBUILD = "in the source folder `make clean install` builds the environment anew; elsewhere install the package again"


def absent(packages: tuple[str, ...]) -> list[str]:
    return [package for package in packages if find_spec(package) is None]


def how_to_install(*packages: str) -> str:
    """Return `pip install 'torch>=2.11'`, with the alternative for a CPU."""
    by_make = {EXTRA_OF[package] for package in packages} & {"learner", "rollout"}
    on_cpu = " (on a CPU: `make install` in the source folder)" if by_make else ""
    extension = ", and its extension for torch, as docs/gpus.md says" if "transformer_engine" in packages else ""
    names = (name for package in packages for name in DISTRIBUTIONS.get(package, (package,)))
    return pip_install(*names) + extension + on_cpu


def own_function(key: str, name: str, given: Collection[str]) -> tuple[Callable[..., Any], frozenset[str]]:
    """Import the function `package.module:function` of a recipe's key; return it and the names in `given` that it
    accepts. Raises RecipeError for a failed import and for other required parameters."""
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
    """Return a function's result as a truth value, NumPy's included; None for anything else, such as an array."""
    try:
        return bool(said) if said in (True, False) else None
    except Exception:  # noqa: BLE001 - the object's comparison may raise anything
        return None
