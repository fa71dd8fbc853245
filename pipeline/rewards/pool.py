"""Reward verifiers in processes that can be killed: one that hangs, crashes or raises costs its own sample only.

    score() ──▶ a thread of this process, one a worker ──verdict pipe──▶ worker ──▶ reward function, confined

Verifiers are foreign code run on model output: they loop, exhaust memory, call os._exit and take the interpreter down;
some mean harm. So each runs behind a worker (pipeline.rewards.worker), one sample at a time, with a deadline, and in
the sandbox of the run (pipeline.rewards.sandbox). A sample whose verifier fails gets reward 0 and the part
`verifier_failed`. Nothing is shared between workers (no queue, no lock), so a kill cannot hurt another one's sample.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from pipeline.data.border.values import verdict_fault
from pipeline.errors import RecipeError
from pipeline.rewards.judgment import Judgment, failure
from pipeline.rewards.verifiers import TRUSTED
from pipeline.rewards.worker_process import Sandbox, WorkerProcess

_log = logging.getLogger(__name__)

DEFAULT_MEMORY_MIB = 2048


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A score. `failed` is None, or why there is none: one of pipeline.rewards.judgment.FAILURES."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    failed: str | None = None


class Verifiers:
    """`workers` processes that run one reward function (`package.module:function`, see `pipeline.rewards.verifiers`).

    `failures` counts failed samples by reason. Use it as a context manager.
    """

    def __init__(
        self,
        reward: str,
        workers: int,
        deadline_s: float,
        *,
        sandbox: Sandbox | None,
        memory_mib: int = DEFAULT_MEMORY_MIB,
    ) -> None:
        """Starts the workers. Without a sandbox, reward code runs as this user, and nothing is kept from it; built-in
        rewards that run no code of others always do. Raises RecipeError when the function cannot be imported there."""
        self.failures: Counter[str] = Counter()
        self._reward = reward
        self._closed = threading.Event()
        self._idle: SimpleQueue[WorkerProcess] = SimpleQueue()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verifier")
        used = None if reward in TRUSTED else sandbox
        self._workers = [WorkerProcess(reward, deadline_s, memory_mib, used) for _ in range(workers)]
        problems = [problem for problem in self._threads.map(WorkerProcess.start, self._workers) if problem is not None]
        if problems:
            self.close()
            where = "" if used is None else f" in the sandbox ({used.rung})"
            raise RecipeError(
                f"reward {reward!r} cannot be imported{where}: {problems[0]}; install the package that holds it, or "
                "set the task's reward to another package.module:function"
                + ("" if used is None else "; docs/sandbox.md says what the sandbox shows")
            )
        for worker in self._workers:
            self._idle.put(worker)

    async def score(self, prompt: str, response: str, answer: str) -> Verdict:
        """The verdict on one response. Whatever the verifier does, nothing is raised. A sample waits until a worker is
        free."""
        judgment = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._judge, prompt, response, answer
        )
        if judgment.failed is None:
            fault = verdict_fault(judgment.reward, judgment.parts)
            if fault is None:
                return Verdict(reward=judgment.reward, parts=judgment.parts)
            judgment = failure("bad_result", fault)
        assert judgment.failed is not None
        self.failures[judgment.failed] += 1
        _log.warning("verifier %s failed (%s): %s", self._reward, judgment.failed, judgment.detail)
        return Verdict(reward=0.0, parts={"verifier_failed": 1.0}, failed=judgment.failed)

    def close(self) -> None:
        """Kill the workers, whatever they are doing."""
        self._closed.set()
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.kill()  # it may have been replaced while the others were killed
            worker.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _judge(self, prompt: str, response: str, answer: str) -> Judgment:
        """Runs in a thread of the pool. There are as many threads as workers, so one worker is always idle."""
        worker = self._idle.get_nowait()
        try:
            if not worker.alive and not self._closed.is_set() and (problem := worker.start()) is not None:
                return failure("crashed", f"the worker could not be started again: {problem}")
            return worker.ask(prompt, response, answer)
        finally:
            self._idle.put(worker)
