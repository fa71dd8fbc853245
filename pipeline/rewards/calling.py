"""Call reward functions: found by name, called with what their parameters name, tried again where the way to a server
failed; what they return becomes Judgments."""

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
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from traceback import walk_tb
from typing import Any, Self

from pipeline.rewards.messages import MAX_NAME, MAX_PARTS, Judgment, failure, together, without_secrets

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
        metadata = given["metadata"]  # holds the columns that verl's data has beside prompt and answer
        extra = metadata.get("extra_info", metadata)
        given |= dict(
            zip(_VERL, (metadata.get("data_source", ""), given["response"], given["answer"], extra), strict=True)
        )
    names = _by_name(inspect.signature(function), given)
    return function(**{name: given[name] for name in names}) if names else function(*(given[n] for n in _IN_ORDER))


def _is_for_verl(signature: inspect.Signature) -> bool:
    return not signature.parameters.keys().isdisjoint(_VERL)


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
"""(package, class) of errors that say that the way to a server failed. Others of these packages, such as an address
that is none or a missing key, would come again."""


def may_pass(error: Exception) -> bool:
    """Whether to ask again: a connection that failed, or an answer 408, 429 or 5xx. A mistake in the function, and any
    other answer, would come again."""
    if isinstance(error.__cause__ or error.__context__, PermissionError) or isinstance(error, PermissionError):
        return False  # the sandbox
    response = getattr(error, "response", None)
    for status in (getattr(response, "status_code", None), *(getattr(error, n, None) for n in ("status", "code"))):
        if isinstance(status, int):
            return status in (408, 429) or status >= 500
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or bool(kinds & _ON_THE_WAY)


def retried(call: Callable[[], Any], retries: int) -> Any:
    """What `call` returns in the end. Raises what it raises last."""
    for pause_s in _pauses(retries):
        try:
            return call()
        except Exception as error:
            if not may_pass(error):
                raise
            time.sleep(pause_s)
    return call()


async def retried_async(call: Callable[[], Awaitable[Any]], retries: int) -> Any:
    """`retried`, of an async function."""
    for pause_s in _pauses(retries):
        try:
            return await call()
        except Exception as error:
            if not may_pass(error):
                raise
            await asyncio.sleep(pause_s)
    return await call()


def _pauses(retries: int) -> Iterator[float]:
    """Seconds; twice as long each time, and of random length, so that samples do not ask again in step."""
    for number in range(retries):
        yield _FIRST_PAUSE_S * 2**number * random.uniform(0.5, 1.0)


STARTED_A_PROCESS = "it starts a process"
_STARTS = re.compile("fork|spawn|exec")
_MOST_SHOWN = 200
_MOST_SAID = 300
_PIPELINE = f"{Path(__file__).parents[1]}/"
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
            lists = {plural: [sample[name] for sample in samples] for plural, name in _PLURALS.items()}
            results = _result(lambda: call(function, **lists), retries)
            found = list(results) if isinstance(results, Iterable) else []
            if len(found) != len(samples):
                expected = f"expected a list of {len(samples)}, one for each response"
                return failure("bad_result", f"returned {_shown(results)}, {expected}")
            return together([as_judgment(result) for result in found])
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


def _raised(error: BaseException) -> Judgment:
    return failure("raised", describe_error(error))


def describe_error(error: BaseException) -> str:
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
