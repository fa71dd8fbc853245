"""Reward functions are found by name and called with three strings; the built-in ones are here.

A reward function is `function(prompt, response, answer)` and returns a number, or (number, {part: number}) where the
parts explain it. This module is imported by every worker, so it stays light.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pipeline.rewards.judgment import Judgment, failure

MATH_VERIFY_TIMEOUT_S = 5


PYTHON_TESTS = "pipeline.rewards.verifiers:python_tests"
TRUSTED = frozenset(f"pipeline.rewards.verifiers:{name}" for name in ("math_verify", "exact_match"))
"""Built-in rewards that run no code of others: they need no sandbox, and a worker calls them itself."""


@lru_cache(maxsize=4)
def resolve(reward: str) -> Callable[[str, str, str], Any]:
    """The function called `package.module:function`. Raises ImportError, AttributeError or ValueError."""
    module, colon, name = reward.partition(":")
    if not colon:
        raise ValueError(f"{reward!r} is not package.module:function")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise ValueError(f"{reward!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def judge(reward: str, prompt: str, response: str, answer: str) -> Judgment:
    """Call the reward function; whatever it does short of killing the process becomes a Judgment."""
    try:
        return _as_judgment(resolve(reward)(prompt, response, answer))
    except MemoryError:
        return failure("memory", "MemoryError: not enough was left")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code: its failure costs its own sample only
        return Judgment(0.0, {}, "raised", f"{type(error).__name__}: {error}")


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

    `answer` is LaTeX, with or without `$` or `\\boxed`, or a plain number, expression or choice. The package's
    own limits use SIGALRM, which works because a worker runs verifiers in its main thread; the worker's deadline stands
    behind them.
    """
    from math_verify import parse, verify

    gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=MATH_VERIFY_TIMEOUT_S)
    if not gold:
        raise ValueError(f"answer {answer!r} is not mathematics that math-verify can parse")
    found = parse(response, parsing_timeout=MATH_VERIFY_TIMEOUT_S)
    return float(verify(gold, found, timeout_seconds=MATH_VERIFY_TIMEOUT_S))


def exact_match(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """1 if the response, without its end-of-sequence token, is the answer and nothing else; otherwise 0."""
    return float(response == answer)


def python_tests(prompt: str, response: str, answer: str) -> float:
    """1 if the Python program in the response passes the tests in `answer`. Never called: a worker runs the program
    itself, in a process of its own (`pipeline.rewards.programs`)."""
    raise NotImplementedError("python_tests is run by the workers of pipeline.rewards.pool")
