"""What a reward function asks for, by the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

_IN_ORDER = ("prompt", "response", "answer")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What verl calls them (`compute_score`)."""
_SINGULARS = (*_IN_ORDER, "metadata", "info")
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
    verl: bool = False
    """It is written for verl: it names some of what only verl calls so."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Where a dict that it returns has the reward."""
        return ("reward", "score") if self.verl else ("reward",)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Self:
        """Raises TypeError for a function that cannot be called with what is given, ValueError for what has no
        signature."""
        signature = inspect.signature(function)
        parameters = signature.parameters
        asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object whose call is async
        )
        batched = "responses" in parameters
        if plural := [f"{name}s" for name in _VERL if f"{name}s" in parameters]:
            raise TypeError(
                f"a reward cannot be called as {signature}: {plural[0]} is of verl's batched rewards; name responses, "
                "answers and metadata in place of solution_strs, ground_truths, and data_sources and extra_infos"
            )
        verl = not batched and _is_for_verl(signature)
        _require_callable(signature, _PLURALS if batched else (*_SINGULARS, *_VERL) if verl else _SINGULARS)
        rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        concurrent = asynchronous and not batched
        return cls(batched=batched, concurrent=concurrent, info=rest or "info" in parameters, verl=verl)

    def numbers(self) -> dict[str, float]:
        """For the message that says that a function was imported."""
        return {name: 1.0 for name, wanted in vars(self).items() if wanted}

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, float]) -> Self:
        """What `numbers` made."""
        return cls(**{name: name in numbers for name in ("batched", "concurrent", "info", "verl")})


def call(function: Callable[..., Any], **given: Any) -> Any:
    """What the function returns, for an async one what is to be awaited.

    A function gets by keyword those of the `given` that it names, with **rest all of them. One that names none gets
    prompt, response and answer in order, whatever it calls them. One that is written for verl gets what that calls
    them.
    """
    if "response" in given and _is_for_verl(inspect.signature(function)):
        given |= _for_verl(given)
    names = _by_name(inspect.signature(function), given)
    return function(**{name: given[name] for name in names}) if names else function(*(given[n] for n in _IN_ORDER))


def _is_for_verl(signature: inspect.Signature) -> bool:
    return not signature.parameters.keys().isdisjoint(_VERL)


def _for_verl(given: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that verl's data has beside prompt and answer are metadata here."""
    metadata = given["metadata"]
    extra = metadata.get("extra_info", metadata)
    of_data = (metadata.get("data_source", ""), given["response"], given["answer"], extra)
    return dict(zip(_VERL, of_data, strict=True))


def _by_name(signature: inspect.Signature, given: Collection[str]) -> list[str]:
    """Which of `given` a function gets by keyword; none for one that is called by position."""
    parameters = signature.parameters.values()
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [p.name for p in parameters if p.kind in by_keyword and p.name in given]
    rest = [p for p in parameters if p.kind is p.VAR_KEYWORD]
    others = [p for p in parameters if p.name not in named and p.default is p.empty and p not in rest]
    return list(given) if rest and (named or not others) else named


def _require_callable(signature: inspect.Signature, given: Collection[str]) -> None:
    """Raises TypeError for a function that `call` cannot call, such as one that names some of `given` and needs
    something else: by position it would get the wrong texts."""
    names = _by_name(signature, given)
    try:
        signature.bind(**dict.fromkeys(names)) if names else signature.bind(*_IN_ORDER)
    except TypeError as error:
        raise TypeError(
            f"a reward cannot be called as {signature}: {error}; name some of {', '.join(given)} and give all else a "
            f"default, or name none of them and take {', '.join(_IN_ORDER)} in this order"
        ) from None


def in_lists(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """What a batched function is given of these samples."""
    return {plural: [sample[name] for sample in samples] for plural, name in _PLURALS.items()}
