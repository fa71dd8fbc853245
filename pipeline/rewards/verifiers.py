"""Reward functions are found by name and called with what they name; the built-in ones are here.

A reward function names what it wants of `prompt`, `response`, `answer` and `metadata` (see `call`), may be async, and
returns a number, or (number, {part: number}) where the parts explain it. Every worker imports this module, so it stays
light.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from pipeline.rewards.judgment import Judgment, failure

MATH_VERIFY_TIMEOUT_S = 5
_IN_ORDER = ("prompt", "response", "answer")


PYTHON_TESTS = "pipeline.rewards.verifiers:python_tests"
MATH_VERIFY = "pipeline.rewards.verifiers:math_verify"
EXACT_MATCH = "pipeline.rewards.verifiers:exact_match"
TRUSTED = frozenset((MATH_VERIFY, EXACT_MATCH))
"""Built-in rewards that run no code of others: they need no sandbox, and a worker calls them itself."""


@lru_cache(maxsize=4)
def resolve(reward: str) -> Callable[..., Any]:
    """The function called `package.module:function`. Raises ImportError, AttributeError or ValueError."""
    module, colon, name = reward.partition(":")
    if not colon:
        raise ValueError(f"{reward!r} is not package.module:function")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise ValueError(f"{reward!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def judge(
    reward: str, prompt: str, response: str, answer: str, metadata: Mapping[str, Any] = MappingProxyType({})
) -> Judgment:
    """Call the reward function; whatever it does short of killing the process becomes a Judgment."""
    try:
        given = dict(prompt=prompt, response=response, answer=answer, metadata=dict(metadata))
        return _as_judgment(call(resolve(reward), **given))
    except MemoryError:
        return failure("memory", "MemoryError: not enough was left")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code: its failure costs its own sample only
        return Judgment(0.0, {}, "raised", f"{type(error).__name__}: {error}")


def call(function: Callable[..., Any], **given: Any) -> Any:
    """What the function returns; an async one is waited for.

    A function gets by keyword those of the `given` that it names. One that needs something of another name gets prompt,
    response and answer in order, whatever it calls them.
    """
    parameters = inspect.signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} & set(given)
    others = [p for p in parameters if p.name not in named]
    if named and all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in others):
        rest = any(p.kind is p.VAR_KEYWORD for p in others)
        result = function(**{name: one for name, one in given.items() if rest or name in named})
    else:
        result = function(*(given[name] for name in _IN_ORDER))
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _as_judgment(result: Any) -> Judgment:
    value, parts = result if isinstance(result, tuple) else (result, {})
    try:
        reward = float(value)
        numbers = {str(name): float(part) for name, part in parts.items()}
    except (TypeError, ValueError, AttributeError):
        return Judgment(0.0, {}, "bad_result", f"returned {result!r:.200}, expected a number or (number, parts)")
    if not all(math.isfinite(number) for number in (reward, *numbers.values())):
        return Judgment(0.0, {}, "non_finite", f"returned {result!r:.200}")
    return Judgment(reward, numbers)


def math_verify(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """1 if the response's last answer equals `answer` as mathematics, else 0 (the `math-verify` package).

    `answer` is LaTeX, with or without `$` or `\\boxed`, or a plain number, expression, choice or word. A choice or
    a word counts in `\\boxed`, or where it is the whole response. The package's own limits use SIGALRM, which works
    because a worker runs verifiers in its main thread; the worker's deadline stands behind them.
    """
    from math_verify import parse, verify

    gold = parse(boxed(answer), parsing_timeout=MATH_VERIFY_TIMEOUT_S)
    if not gold:
        raise ValueError(f"answer {answer!r} is not mathematics that math-verify can parse")
    if response.strip() == answer.strip():  # a word alone, such as Paris, is no mathematics that `parse` would find
        return 1.0
    found = parse(response, parsing_timeout=MATH_VERIFY_TIMEOUT_S)
    return float(verify(gold, found, timeout_seconds=MATH_VERIFY_TIMEOUT_S))


def boxed(answer: str) -> str:
    """How a response names its answer for `math_verify`."""
    return f"\\boxed{{{answer}}}"


def exact_match(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """1 if the response, without its end-of-sequence token, is the answer and nothing else; otherwise 0."""
    return float(response == answer)


def python_tests(prompt: str, response: str, answer: str) -> float:
    """1 if the Python program in the response passes the tests in `answer`. Never called: a worker runs the program
    itself, in a process of its own (`pipeline.rewards.programs`)."""
    raise NotImplementedError("python_tests is run by the workers of pipeline.rewards.pool")
