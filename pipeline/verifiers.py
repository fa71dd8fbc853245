"""What runs inside a verifier process: reward functions are found by name and called with three strings.

A reward function is `function(prompt, response, answer)` and returns a number, or (number, {part: number}) where the
parts explain it. This module is imported by every worker, so it stays light.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

MATH_VERIFY_TIMEOUT_S = 5


class Judgement(NamedTuple):
    """What a worker sends back; plain values only. `failed` is a reason, with `detail` for the log."""

    reward: float
    parts: dict[str, float]
    failed: str | None = None
    detail: str = ""


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


def warm_up(reward: str) -> None:
    """Import the reward function before the first deadline runs; a failure shows when it is asked for."""
    try_import(reward)


def try_import(reward: str) -> str | None:
    """None if the reward function can be imported, else what went wrong."""
    try:
        resolve(reward)
    except Exception as error:  # noqa: BLE001 - an import runs foreign code; what it raised is the answer
        return f"{type(error).__name__}: {error}"
    return None


def judge(reward: str, prompt: str, response: str, answer: str) -> Judgement:
    """Call the reward function; whatever it does short of killing the process becomes a Judgement."""
    try:
        return _as_judgement(resolve(reward)(prompt, response, answer))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code: its failure costs its own sample only
        return Judgement(0.0, {}, "raised", f"{type(error).__name__}: {error}")


def _as_judgement(result: Any) -> Judgement:
    value, parts = result if isinstance(result, tuple) else (result, {})
    try:
        reward = float(value)
        numbers = {str(name): float(part) for name, part in parts.items()}
    except (TypeError, ValueError, AttributeError):
        return Judgement(0.0, {}, "bad_result", f"returned {result!r:.200}, expected a number or (number, parts)")
    if not all(math.isfinite(number) for number in (reward, *numbers.values())):
        return Judgement(0.0, {}, "non_finite", f"returned {result!r:.200}")
    return Judgement(reward, numbers)


def math_verify(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """1 if the response's last answer equals `answer` as mathematics, else 0 (the `math-verify` package).

    `answer` is LaTeX or a plain number or expression. The package's own limits use SIGALRM, which works here because a
    worker runs verifiers in its main thread; the worker's deadline stands behind them.
    """
    from math_verify import parse, verify

    gold = parse(answer) or parse(f"${answer}$")
    if not gold:
        raise ValueError(f"answer {answer!r} is not mathematics that math-verify can parse")
    found = parse(response, parsing_timeout=MATH_VERIFY_TIMEOUT_S)
    return float(verify(gold, found, timeout_seconds=MATH_VERIFY_TIMEOUT_S))
