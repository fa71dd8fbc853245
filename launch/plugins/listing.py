"""List what a recipe can name, by kind, in Even Keel and in modules of the user's own."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

from pipeline.advantages.methods import Advantage
from pipeline.config.algorithm import ADVANTAGES, CORRECTIONS, OBJECTIVES
from pipeline.config.task_sections import SortDigitsTask, SpellDigitsTask
from pipeline.errors import RecipeError
from pipeline.rewards import verifiers
from pipeline.rollout.batch_builder import GIVEN as GROUP_GIVEN
from pipeline.tasks.data import GIVEN, Data
from pipeline.tasks.task import ASKED_OF_A_TASK
from precision.corrections import Correction
from precision.objectives.objective import Objective
from precision.settings import Settings, name_of
from precision.text import one_line

Kind = Literal["objective", "correction", "advantage", "task", "reward", "filter", "group_filter"]

ASKED: dict[Kind, str] = {
    "objective": "a class derived from precision.objectives.objective.Objective",
    "correction": "a class derived from precision.corrections.Correction",
    "advantage": "a class derived from pipeline.advantages.methods.Advantage",
    "task": "a class with what pipeline.tasks.task.Task asks for",
    "reward": "a function that names response, or responses of a group",
    "filter": f"a function of some of {', '.join(GIVEN)}",
    "group_filter": f"a function that names rewards, of some of {', '.join(GROUP_GIVEN)}",
}
"""Kind → requirement on a user's own class or function."""

_CHOICES: tuple[tuple[Kind, type[Settings], dict[str, Any]], ...] = (
    ("objective", Objective, dict(OBJECTIVES)),
    ("correction", Correction, dict(CORRECTIONS)),
    ("advantage", Advantage, dict(ADVANTAGES)),
)

_SENTENCE_END = re.compile(r"(?<=\.)(?<!Dr\.)\s+(?=[A-Z])")


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A class or function that a recipe can name."""

    kind: Kind
    key: str
    """The recipe's key that names it, such as `objective.name`."""
    value: str
    says: str
    """First sentence of its docstring, or of the docstring of its module, for the only choice in a module of ours."""
    lacks: str = ""
    """Reason why a recipe that names it would be refused."""


def shipped() -> list[Plugin]:
    found = []
    for kind, _, named in _CHOICES:
        alone = Counter(choice.__module__ for choice in named.values())
        for name, choice in named.items():
            thing = import_module(choice.__module__) if alone[choice.__module__] == 1 else choice
            found.append(Plugin(kind=kind, key=f"{kind}.name", value=name, says=_says(thing)))
    tasks = {"sort_digits": "Digits, to be sorted.", "spell_digits": "Digits, to be spelled.", "data": _says(Data)}
    assert SortDigitsTask.model_fields["name"].default in tasks
    assert get_args(SpellDigitsTask.model_fields["name"].annotation)[0] in tasks
    found += [Plugin(kind="task", key="task.name", value=name, says=said) for name, said in tasks.items()]
    rewards = (verifiers.math_verify, verifiers.python_tests, verifiers.exact_match)
    return found + [Plugin(kind="reward", key="task.reward", value=f.__name__, says=_says(f)) for f in rewards]


def key_of(kind: Kind) -> str:
    """Return the recipe's key that names a user's own plugin of a kind."""
    if kind == "group_filter":
        return "prompts.group_filter"
    return f"task.{kind}" if kind in ("reward", "filter") else f"{kind}.class"


def of_modules(names: Sequence[str]) -> list[Plugin]:
    """Return the plugins of modules, in order. Raises RecipeError where an import fails or a module has none."""
    all_found = []
    for name in names:
        if name.endswith(".py") and name.removesuffix(".py").isidentifier():
            raise RecipeError(
                f"{one_line(name, 120)} is a file, expected the name of a module; `evenkeel plugins "
                f"{one_line(name.removesuffix('.py'), 120)}`"
            )
        try:
            module = import_module(name)
        except Exception as error:
            raise RecipeError(
                f"{one_line(name, 120)} cannot be imported ({type(error).__name__}: {one_line(error, 200)}); give the "
                "name of a module, such as mypackage.rewards, and run the command where Python finds it"
            ) from error
        found = []
        for word, thing in vars(module).items():
            if word.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
                continue
            if (kind := _kind_of(thing)) is None:
                continue
            lacks = ""
            if kind in ("objective", "correction", "advantage"):
                if inspect.isabstract(thing):
                    lacks = f"it lacks {', '.join(sorted(thing.__abstractmethods__))}"
                else:
                    try:
                        name_of(thing)
                    except TypeError as error:
                        lacks = str(error)
            value = f"{module.__name__}:{word}"
            found.append(Plugin(kind=kind, key=key_of(kind), value=value, says=_says(thing), lacks=lacks))
        if not found:
            kinds = "; ".join(f"{kind}: {asked}" for kind, asked in ASKED.items())
            raise RecipeError(f"{name} defines nothing that a recipe can name; expected one of: {kinds}")
        all_found += found
    return all_found


def _kind_of(thing: Any) -> Kind | None:
    if isinstance(thing, type):
        for kind, base, _ in _CHOICES:
            if issubclass(thing, base):
                return kind
        held = {*dir(thing), *(name for base in thing.__mro__ for name in vars(base).get("__annotations__", ()))}
        return "task" if held.issuperset(ASKED_OF_A_TASK) else None
    if not inspect.isfunction(thing):
        return None
    names = {*inspect.signature(thing).parameters}
    if "rewards" in names and names <= {*GROUP_GIVEN}:
        return "group_filter"
    if names & {"response", "responses"}:
        return "reward"
    return "filter" if names and names <= {*GIVEN} else None


def _says(thing: Any) -> str:
    paragraph = inspect.cleandoc(thing.__doc__ or "–").partition("\n\n")[0]
    return one_line(_SENTENCE_END.split(paragraph.replace("\n", " "), 1)[0], 400)
