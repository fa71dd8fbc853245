"""Reward verifiers in processes that can be killed: one that hangs, crashes or raises costs its own sample only.

Verifiers are foreign code run on model output: they loop, exhaust memory, call os._exit and take the interpreter down.
So each call is a job of a pool of spawned workers (no torch, no open sockets inherited) with a deadline from the moment
it starts. A worker that is killed is replaced; the sample gets reward 0 and the part `verifier_failed`.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from collections import Counter
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from pebble import ProcessExpired, ProcessPool

from pipeline.errors import RecipeError
from pipeline.verifiers import Judgement, judge, try_import, warm_up

_log = logging.getLogger(__name__)

_START_DEADLINE_S = 120.0
"""Longest import of a reward function (sympy behind math-verify takes seconds on a busy machine)."""
_CALLS_ACROSS_BROKEN_POOLS = 2


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A score. `failed` is None, or why there is none: timeout, crashed, raised, non_finite, bad_result."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    failed: str | None = None


class Verifiers:
    """A pool of verifier processes for one reward function.

    `failures` counts failed samples by reason. Use it as a context manager, in a program whose `__main__` is guarded:
    workers are spawned.
    """

    def __init__(self, reward: str, workers: int, deadline_s: float) -> None:
        """Starts the workers. Raises RecipeError when the reward function cannot be imported there."""
        self.failures: Counter[str] = Counter()
        self._reward = reward
        self._workers = workers
        self._deadline_s = deadline_s
        self._pool = self._start_pool()
        try:
            self._check_importable()
        except BaseException:
            self.close()
            raise

    async def score(self, prompt: str, response: str, answer: str) -> Verdict:
        """The verdict on one response; never raises for what the verifier does.

        Waits at most the deadline once a worker has taken the job; jobs wait their turn before that.
        """
        judgement = await self._judge(prompt, response, answer)
        if judgement.failed is None:
            return Verdict(reward=judgement.reward, parts=judgement.parts)
        self.failures[judgement.failed] += 1
        _log.warning("verifier %s failed (%s): %s", self._reward, judgement.failed, judgement.detail)
        return Verdict(reward=0.0, parts={"verifier_failed": 1.0}, failed=judgement.failed)

    def close(self) -> None:
        """Kill the workers, whatever they are doing."""
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _judge(self, *texts: str) -> Judgement:
        for _ in range(_CALLS_ACROSS_BROKEN_POOLS):
            pool = self._pool
            try:
                job = pool.schedule(judge, args=(self._reward, *texts), timeout=self._deadline_s)
                return await asyncio.wrap_future(job)
            except TimeoutError:
                return Judgement(0.0, {}, "timeout", f"killed after {self._deadline_s:g} s")
            except ProcessExpired as error:
                return Judgement(0.0, {}, "crashed", f"the process ended with status {error.exitcode}")
            except (BrokenProcessPool, RuntimeError) as error:
                # A worker died between jobs, or before its job was known to have started: the pool gives up.
                self._replace(pool, error)
        return Judgement(0.0, {}, "crashed", "the pool broke twice")

    def _replace(self, broken: ProcessPool, error: Exception) -> None:
        """A new pool, made by the first of the callers that met the broken one."""
        if self._pool is broken:
            _log.warning("verifier pool broke (%s); starting another", error)
            self.close()
            self._pool = self._start_pool()

    def _start_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._workers,
            initializer=warm_up,
            initargs=(self._reward,),
            context=multiprocessing.get_context("spawn"),
        )

    def _check_importable(self) -> None:
        try:
            problem = self._pool.schedule(try_import, args=(self._reward,), timeout=_START_DEADLINE_S).result(
                timeout=2 * _START_DEADLINE_S
            )
        except (TimeoutError, ProcessExpired, BrokenProcessPool, RuntimeError) as error:
            problem = f"importing it ended the process or took over {_START_DEADLINE_S:g} s ({error})"
        if problem is not None:
            raise RecipeError(
                f"reward {self._reward!r} cannot be imported: {problem}; install the package that holds it, or set the "
                "task's reward to another package.module:function"
            )
