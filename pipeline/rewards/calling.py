"""Call a user's reward function by name, and turn its results into Judgments.

The function gets the arguments that its parameters name. A call is repeated when the connection to a server failed.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import inspect
import linecache
import math
import random
import re
import sysconfig
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from traceback import walk_tb
from typing import Any

from pipeline.rewards.messages import MAX_NAME, MAX_PARTS, Judgment, failure, together, without_secrets

_IN_ORDER = ("prompt", "response", "answer")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Argument names of verl's reward functions (`compute_score`)."""
_SINGULARS = (*_IN_ORDER, "metadata", "info")
_PLURALS = {"prompts": "prompt", "responses": "response", "answers": "answer", "metadata": "metadata", "info": "info"}


Wants = frozenset[str]
"""Some of KINDS: how a function is called.

    batched     it names `responses`: it is called once for a group, with lists
    concurrent  it is async: several samples are under way at once
    info        it names `info` or takes **rest
    verl        it is written for verl: it names some of _VERL
"""
KINDS = frozenset(("batched", "concurrent", "info", "verl"))


def wants_of(function: Callable[..., Any]) -> Wants:
    """Return how a function is called, read from its signature. Raises ValueError without a signature, and TypeError
    for a function that `call` cannot call, such as one that names some given arguments and requires others."""
    signature = inspect.signature(function)
    parameters = signature.parameters
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object whose call is async
    )
    if plural := [f"{name}s" for name in _VERL if f"{name}s" in parameters]:
        raise TypeError(
            f"a reward cannot be called as {signature}: {plural[0]} is of verl's batched rewards; name responses, "
            "answers and metadata in place of solution_strs, ground_truths, and data_sources and extra_infos"
        )
    batched = "responses" in parameters
    verl = not batched and not parameters.keys().isdisjoint(_VERL)
    given = tuple(_PLURALS) if batched else (*_SINGULARS, *_VERL) if verl else _SINGULARS
    names = _by_name(signature, given)
    try:
        signature.bind(**dict.fromkeys(names)) if names else signature.bind(*_IN_ORDER)
    except TypeError as error:
        raise TypeError(
            f"a reward cannot be called as {signature}: {error}; name some of {', '.join(given)} and give all else a "
            f"default, or name none of them and take {', '.join(_IN_ORDER)} in this order"
        ) from None
    info = "info" in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    found = dict(batched=batched, concurrent=asynchronous and not batched, info=info, verl=verl)
    return frozenset(name for name, wanted in found.items() if wanted)


def call(function: Callable[..., Any], **given: Any) -> Any:
    """Call the function and return its result, an awaitable for an async function. It gets by keyword the `given`
    arguments that it names, with **rest all of them. A function that names none gets prompt, response and answer by
    position. A function written for verl gets verl's arguments."""
    signature = inspect.signature(function)
    if "response" in given and not signature.parameters.keys().isdisjoint(_VERL):
        metadata = given["metadata"]  # holds the columns that verl's data has beside prompt and answer
        extra = metadata.get("extra_info", metadata)
        given |= dict(
            zip(_VERL, (metadata.get("data_source", ""), given["response"], given["answer"], extra), strict=True)
        )
    names = _by_name(signature, given)
    return function(**{name: given[name] for name in names}) if names else function(*(given[n] for n in _IN_ORDER))


def _by_name(signature: inspect.Signature, given: Collection[str]) -> list[str]:
    """Return the names in `given` that a function gets by keyword; none for a function called by position."""
    parameters = signature.parameters.values()
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [p.name for p in parameters if p.kind in by_keyword and p.name in given]
    rest = [p for p in parameters if p.kind is p.VAR_KEYWORD]
    others = [p for p in parameters if p.name not in named and p.default is p.empty and p not in rest]
    return list(given) if rest and (named or not others) else named


_FIRST_PAUSE_S = 0.5
_ON_THE_WAY = frozenset(
    (
        *(("aiohttp", name) for name in ("ClientConnectionError", "ClientPayloadError")),
        *((client, "APIConnectionError") for client in ("anthropic", "openai")),
        *(("httpcore", name) for name in ("NetworkError", "TimeoutException", "RemoteProtocolError")),
        ("httpx", "TransportError"),
        *(("requests", name) for name in ("ConnectionError", "Timeout", "ChunkedEncodingError")),
        ("urllib", "URLError"),
        *(("urllib3", name) for name in ("MaxRetryError", "ProtocolError", "TimeoutError")),
    )
)
"""(package, class) of errors that mean that a connection to a server failed. Other errors of these packages, such as an
invalid address or a missing key, would occur again."""


def may_pass(error: Exception) -> bool:
    """Return whether a call may succeed if repeated: its connection failed, or the answer was 408, 429 or 5xx. A
    mistake in the function, and any other answer, would occur again."""
    if isinstance(error.__cause__ or error.__context__, PermissionError) or isinstance(error, PermissionError):
        return False  # the sandbox
    response = getattr(error, "response", None)
    for status in (getattr(response, "status_code", None), *(getattr(error, n, None) for n in ("status", "code"))):
        if isinstance(status, int):
            return status in (408, 429) or status >= 500
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or bool(kinds & _ON_THE_WAY)


def _pauses(retries: int) -> Iterator[float]:
    """Yield seconds to wait, doubled each time, with random lengths so that samples do not retry in step."""
    for number in range(retries):
        yield _FIRST_PAUSE_S * 2**number * random.uniform(0.5, 1.0)


STARTED_A_PROCESS = "it starts a process"
_STARTS = re.compile("fork|spawn|exec")
_MOST_SHOWN = 200
_MOST_SAID = 300
_PIPELINE = f"{Path(__file__).parents[1]}/"
_PYTHONS = f"{sysconfig.get_path('stdlib')}/"
_INSTALLED = tuple(f"{sysconfig.get_path(kind)}/" for kind in ("purelib", "platlib"))
"""Folders of code that is not the user's, with _PIPELINE and _PYTHONS."""
_EXPECTED = 'a number, (number, {part: number}) or {"reward": number, part: number}'


@lru_cache(maxsize=4)
def resolve(reward: str) -> Callable[..., Any]:
    """Return the function named `package.module:function`. Raises ImportError, AttributeError or ValueError."""
    module, colon, name = reward.partition(":")
    if not colon:
        raise ValueError(f"{reward!r} is not package.module:function")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise ValueError(f"{reward!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def judge(reward: str, samples: list[dict[str, Any]], *, deadline_s: float = math.inf, retries: int = 0) -> Judgment:
    """Call the reward function and return its Judgment, with those on all samples after the first as `rest`. Any
    behavior short of killing the process becomes a Judgment. `deadline_s` ends each async call with its retries."""
    try:
        function = resolve(reward)
        wants = wants_of(function)
        if "batched" in wants:
            lists = {plural: [sample[name] for sample in samples] for plural, name in _PLURALS.items()}
            results = retried(lambda: call(function, **lists), retries)
            found = list(results) if isinstance(results, Iterable) else []
            if len(found) != len(samples):
                expected = f"expected a list of {len(samples)}, one for each response"
                return failure("bad_result", f"returned {_shown(results)}, {expected}")
            return together([as_judgment(result) for result in found])
        if "concurrent" in wants:
            return together(_loop().run(_concurrent(function, samples, deadline_s, retries)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code: its failure costs its own sample only
        return _failed(error)
    judgments = []
    for sample in samples:
        try:
            result = retried(lambda sample=sample: call(function, **sample), retries)  # type: ignore[misc]
            judgments.append(as_judgment(result, verl="verl" in wants))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code, as above
            judgments.append(_failed(error))
    return together(judgments)


def _failed(error: BaseException) -> Judgment:
    if isinstance(error, MemoryError):
        return failure("memory", "MemoryError: not enough was left")
    return failure("raised", describe_error(error))


def retried(made: Callable[[], Any], retries: int) -> Any:
    """Return a call's result, awaited if it is awaitable, with retries. Raises the last attempt's error."""

    async def awaited(result: Awaitable[Any]) -> Any:
        return await result

    for pause_s in (*_pauses(retries), None):
        try:
            result = made()
            return _loop().run(awaited(result)) if inspect.isawaitable(result) else result
        except Exception as error:
            if pause_s is None or not may_pass(error):
                raise
            time.sleep(pause_s)
    raise AssertionError("the last turn returns or raises")


async def _concurrent(
    function: Callable[..., Any], samples: list[dict[str, Any]], deadline_s: float, retries: int
) -> list[Judgment]:
    verl = "verl" in wants_of(function)

    async def one(sample: dict[str, Any]) -> Judgment:
        limit = asyncio.timeout(None if math.isinf(deadline_s) else deadline_s)
        try:
            async with limit:
                for pause_s in _pauses(retries):
                    try:
                        return as_judgment(await call(function, **sample), verl=verl)
                    except Exception as error:
                        if not may_pass(error):
                            raise
                    await asyncio.sleep(pause_s)
                return as_judgment(await call(function, **sample), verl=verl)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code, as above
            if limit.expired():
                return failure("timeout", f"no answer within {deadline_s:g} s")
            return failure("raised", describe_error(error))

    return list(await asyncio.gather(*map(one, samples)))


@lru_cache(maxsize=1)
def _loop() -> asyncio.Runner:
    """Return the event loop of this process. Clients that a function keeps belong to one loop."""
    return asyncio.Runner()


def as_judgment(result: Any, *, verl: bool = False) -> Judgment:
    """Return the Judgment for a function's result. A dict has it under `reward`, for verl also `score`."""
    keys = ("reward", "score") if verl else ("reward",)
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


def describe_error(error: BaseException) -> str:
    """Return the error and the innermost frame outside Even Keel and Python that raised it, as in `KeyError: 'score'
    (/home/me/my_rewards.py:12)`; a frame in an installed package only where there is no other."""
    message = without_secrets(f"{type(error).__name__}: {error}")  # before the cut, which could split a secret
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    if isinstance(error, PermissionError) and error.errno == errno.EPERM:  # a socket is refused in the same words
        through = any(name.endswith("/subprocess.py") or "/multiprocessing/" in name for name, _ in frames)
        if through or (frames and _STARTS.search(linecache.getline(*frames[-1]))):
            message += f"; {STARTED_A_PROCESS}"
    theirs = [place for place in frames if not place[0].startswith((_PYTHONS, _PIPELINE, "<frozen "))]
    own = [place for place in theirs if not place[0].startswith(_INSTALLED)]
    installed = [place for place in frames if place[0].startswith(_INSTALLED)]
    if not (own or installed):
        return message
    name, line = (own or installed)[-1]
    return f"{message[:_MOST_SAID]} ({name}:{line})"


def _shown(result: Any) -> str:
    return without_secrets(repr(result))[:_MOST_SHOWN]  # in this order: a cut could split a secret
