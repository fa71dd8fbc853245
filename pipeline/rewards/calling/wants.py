"""What a reward function asks for, by the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

_IN_ORDER = ("prompt", "response", "answer")
_PLURALS = {"prompts": "prompt", "responses": "response", "answers": "answer", "metadata": "metadata", "info": "info"}


@dataclass(frozen=True)
class Wants:
    """How a function is called."""

    batched: bool = False
    """It names `responses`: it is called once for a group, with lists."""
    concurrent: bool = False
    """It is async: several samples are under way at once."""
    info: bool = False
    """It names `info`."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Self:
        """Raises ValueError or TypeError for what has no signature."""
        parameters = inspect.signature(function).parameters
        asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object whose call is async
        )
        rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        batched = "responses" in parameters
        return cls(batched=batched, concurrent=asynchronous and not batched, info=rest or "info" in parameters)

    def numbers(self) -> dict[str, float]:
        """For the message that says that a function was imported."""
        return {name: 1.0 for name, wanted in vars(self).items() if wanted}

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, float]) -> Self:
        """What `numbers` made."""
        return cls(**{name: name in numbers for name in ("batched", "concurrent", "info")})


def call(function: Callable[..., Any], **given: Any) -> Any:
    """What the function returns, for an async one what is to be awaited.

    A function gets by keyword those of the `given` that it names. One that needs something of another name gets prompt,
    response and answer in order, whatever it calls them.
    """
    parameters = inspect.signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} & set(given)
    others = [p for p in parameters if p.name not in named]
    if named and all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in others):
        rest = any(p.kind is p.VAR_KEYWORD for p in others)
        return function(**{name: one for name, one in given.items() if rest or name in named})
    return function(*(given[name] for name in _IN_ORDER))


def in_lists(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """What a batched function is given of these samples."""
    return {plural: [sample[name] for sample in samples] for plural, name in _PLURALS.items()}
