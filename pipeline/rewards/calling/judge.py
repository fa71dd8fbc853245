"""Reward functions are found by name, called with what they name, and what they return becomes Judgments."""

from __future__ import annotations

import asyncio
import errno
import importlib
import inspect
import linecache
import math
import re
import sysconfig
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path
from traceback import walk_tb
from typing import Any

from pipeline.rewards.calling.retries import retried, retried_async
from pipeline.rewards.calling.wants import Wants, call, in_lists
from pipeline.rewards.judgment import MAX_NAME, MAX_PARTS, Judgment, failure, together, without_secrets

STARTED_A_PROCESS = "it starts a process"
_STARTS = re.compile("fork|spawn|exec")
_MOST_SHOWN = 200
_MOST_SAID = 300
_PIPELINE = f"{Path(__file__).parents[2]}/"
_PYTHONS = f"{sysconfig.get_path('stdlib')}/"
_INSTALLED = tuple(f"{sysconfig.get_path(kind)}/" for kind in ("purelib", "platlib"))
"""Where the code lies that is not the user's own."""
_EXPECTED = 'a number, (number, {part: number}) or {"reward": number, part: number}'


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


def judge(reward: str, samples: list[dict[str, Any]], *, deadline_s: float = math.inf, retries: int = 0) -> Judgment:
    """Call the reward function; whatever it does short of killing the process becomes a Judgment, of which those on the
    samples behind the first are `rest`. `deadline_s` ends each call of an async function, with its retries."""
    try:
        function = resolve(reward)
        wants = Wants.of(function)
        if wants.batched:
            results = _result(lambda: call(function, **in_lists(samples)), retries)
            return _of_group(results, len(samples))
        if wants.concurrent:
            return together(_loop().run(_concurrent(function, samples, deadline_s, retries)))
    except MemoryError:
        return failure("memory", "MemoryError: not enough was left")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code: its failure costs its own sample only
        return _raised(error)
    return together([_one(function, sample, retries) for sample in samples])


def _one(function: Callable[..., Any], sample: dict[str, Any], retries: int) -> Judgment:
    try:
        return as_judgment(_result(lambda: call(function, **sample), retries), Wants.of(function).keys)
    except MemoryError:
        return failure("memory", "MemoryError: not enough was left")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code, as above
        return _raised(error)


def _result(made: Callable[[], Any], retries: int) -> Any:
    """What a call returns, waited for where it is to be awaited."""

    def ask() -> Any:
        result = made()
        return _loop().run(_awaited(result)) if inspect.isawaitable(result) else result

    return retried(ask, retries)


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


async def _concurrent(
    function: Callable[..., Any], samples: list[dict[str, Any]], deadline_s: float, retries: int
) -> list[Judgment]:
    keys = Wants.of(function).keys

    async def one(sample: dict[str, Any]) -> Judgment:
        limit = asyncio.timeout(None if math.isinf(deadline_s) else deadline_s)
        try:
            async with limit:
                return as_judgment(await retried_async(lambda: call(function, **sample), retries), keys)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code, as above
            return failure("timeout", f"no answer within {deadline_s:g} s") if limit.expired() else _raised(error)

    return list(await asyncio.gather(*map(one, samples)))


@lru_cache(maxsize=1)
def _loop() -> asyncio.Runner:
    """One for all samples of this process: clients that a function keeps belong to the loop in which they were made."""
    return asyncio.Runner()


def as_judgment(result: Any, keys: tuple[str, ...] = ("reward",)) -> Judgment:
    """What a function returned for one sample; a dict has the reward under one of the `keys`."""
    value, parts = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if isinstance(result, dict) and (key := next((k for k in keys if k in result), None)) is not None:
        value, parts = result[key], {name: part for name, part in result.items() if name != key}
    try:
        reward = float(value)
        # Text beside the number, such as the answer that was found, explains the reward and is no part of it.
        numbers = {str(name): float(part) for name, part in parts.items() if not isinstance(part, str)}
    except (TypeError, ValueError, AttributeError, OverflowError):
        return failure("bad_result", f"returned {_shown(result)}, expected {_EXPECTED}")
    if len(numbers) > MAX_PARTS:
        return failure("bad_result", f"returned {len(numbers)} parts, expected at most {MAX_PARTS}; give fewer")
    if long := [name for name in numbers if len(name) > MAX_NAME]:
        return failure(
            "bad_result", f"returned a part of the name {_shown(long[0])}, expected {MAX_NAME} letters or fewer"
        )
    if not all(math.isfinite(number) for number in (reward, *numbers.values())):
        return failure("non_finite", f"returned {_shown(result)}")
    return Judgment(reward, numbers)


def _of_group(results: Any, count: int) -> Judgment:
    """What a batched function returned. The order is that of the responses."""
    try:
        found = list(results)
    except TypeError:
        found = []
    if len(found) != count:
        return failure("bad_result", f"returned {_shown(results)}, expected a list of {count}, one for each response")
    return together([as_judgment(result) for result in found])


def _raised(error: BaseException) -> Judgment:
    return failure("raised", said_of(error))


def said_of(error: BaseException) -> str:
    """`KeyError: 'score' (/home/me/my_rewards.py:12)`: where it was raised, in the innermost code of the user's own."""
    message = without_secrets(f"{type(error).__name__}: {error}")  # before it is cut: no part of a secret is left
    message += f"; {STARTED_A_PROCESS}" * _is_refused_process(error)
    place = _place_of(error)
    return message if place is None else f"{message[:_MOST_SAID]} ({place})"


def _is_refused_process(error: BaseException) -> bool:
    """Whether the sandbox refused a process. It refuses a socket in the same words."""
    if not isinstance(error, PermissionError) or error.errno != errno.EPERM:
        return False
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    through = any(name.endswith("/subprocess.py") or "/multiprocessing/" in name for name, _ in frames)
    return through or bool(_STARTS.search(linecache.getline(*frames[-1]) if frames else ""))


def _place_of(error: BaseException) -> str | None:
    """File and line of the innermost frame that is neither Even Keel's nor Python's; one of an installed package only
    where there is no other."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    installed = [f"{name}:{line}" for name, line in frames if name.startswith(_INSTALLED)]
    own = [
        f"{name}:{line}" for name, line in frames if not name.startswith((*_INSTALLED, _PYTHONS, _PIPELINE, "<frozen "))
    ]
    return next(reversed(own or installed), None)


def _shown(result: Any) -> str:
    return without_secrets(repr(result))[:_MOST_SHOWN]  # in this order: no part of a secret is left
