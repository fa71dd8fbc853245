"""Results of calls to many engines at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from pipeline.errors import EngineUnavailableError

T = TypeVar("T")


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all calls. A failure cancels none of the others: the first error is raised when all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def summarize(version: int, results: Sequence[dict[str, float] | str]) -> dict[str, float]:
    """What a weight update took, over all engines: the largest of each number, but engines_checked is a count.

    A result is an engine's numbers or why it failed. Raises EngineUnavailableError when all failed.
    """
    taken = [result for result in results if isinstance(result, dict)]
    if not taken:
        raise EngineUnavailableError(
            f"no engine of {len(results)} took version {version}; {'; '.join(map(str, results))}"
        )
    total = {name: max(one[name] for one in taken) for name in taken[0]}
    return total | {"engines_checked": sum(one["engines_checked"] for one in taken)}
