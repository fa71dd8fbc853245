"""Reward verifiers in processes that can be killed: one that hangs, crashes or raises costs its own sample only.

    score() ──▶ a thread of this process, one a worker ──verdict pipe──▶ worker ──▶ reward function, confined

Verifiers are foreign code run on model output: they loop, exhaust memory, call os._exit and take the interpreter down;
some mean harm. So each runs behind a worker (pipeline.rewards.worker), one sample at a time, with a deadline, and in
the sandbox of the run (pipeline.rewards.sandbox). A sample whose verifier fails has no reward, which its part
`verifier_failed` says; nothing is learned from it. Nothing is shared between workers (no queue, no lock), so a kill
cannot hurt another one's sample.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

from pipeline import spans
from pipeline.data.border.values import verdict_fault
from pipeline.errors import RecipeError
from pipeline.rewards.failure_watch import FailureWatch
from pipeline.rewards.judgment import MAX_TEXTS_BYTES, Judgment, encode_texts, failure
from pipeline.rewards.verifiers import TRUSTED
from pipeline.rewards.worker_process import Sandbox, WorkerProcess

_log = logging.getLogger(__name__)

DEFAULT_MEMORY_MIB = 2048
_QUICK_S, _POSTED_AHEAD = 0.02, 4
"""Samples that took less are posted so many at a time. A slow one has none behind it that another worker could take."""


_LONGEST_SPAN_S = 1.0
"""A worker that is never idle notes what it did at least so often."""


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
        watch: FailureWatch | None = None,
    ) -> None:
        """Starts the workers. Without a sandbox, reward code runs as this user, and nothing is kept from it; built-in
        rewards that run no code of others always do. Raises RecipeError when the function cannot be imported there."""
        self.failures: Counter[str] = Counter()
        self._reward, self._watch = reward, watch
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        used = None if reward in TRUSTED else sandbox
        self._workers = [WorkerProcess(reward, deadline_s, memory_mib, used) for _ in range(workers)]
        started: list[Future[str | None]] = [Future() for _ in self._workers]
        # A worker is started by the thread that keeps it: the kernel ends it with the thread that started it.
        self._threads = [
            threading.Thread(target=self._keep, args=(*pair, _BusySpan(number)), name="verifier", daemon=True)
            for number, pair in enumerate(zip(self._workers, started, strict=True))
        ]
        for thread in self._threads:
            thread.start()
        problems = [problem for future in started if (problem := future.result()) is not None]
        if problems:
            self.close()
            raise RecipeError(_cannot_import(reward, problems[0], used))

    async def score(
        self, prompt: str, response: str, answer: str, metadata: Mapping[str, Any] = MappingProxyType({})
    ) -> Verdict:
        """The verdict on one response. A verifier that fails costs this sample alone; RewardError is raised when
        the watch, if there is one, has seen too many. A sample waits until a worker is free."""
        texts = encode_texts(prompt, response, answer, metadata)
        if len(texts) > MAX_TEXTS_BYTES:
            judgment = failure("too_large", f"a sample of {len(texts)} bytes, expected at most {MAX_TEXTS_BYTES}")
        else:
            job = _Job(texts, Future())
            self._jobs.put(job)
            judgment = await asyncio.wrap_future(job.judgment)
        if judgment.failed is None:
            fault = verdict_fault(judgment.reward, judgment.parts)
            if fault is None:
                if self._watch is not None:
                    self._watch.judged()
                return Verdict(reward=judgment.reward, parts=judgment.parts)
            judgment = failure("bad_result", fault)
        assert judgment.failed is not None
        self.failures[judgment.failed] += 1
        if self._watch is not None:
            self._watch.failed(judgment.failed, judgment.detail)
        _log.warning("verifier %s failed (%s): %s", self._reward, judgment.failed, judgment.detail)
        return Verdict(reward=0.0, parts={"verifier_failed": 1.0}, failed=judgment.failed)

    def close(self) -> None:
        """Kill the workers, whatever they are doing."""
        with suppress(Empty):
            while job := self._jobs.get_nowait():
                job.judgment.cancel()
        for worker in self._workers:
            worker.end()
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.kill()  # it may have been replaced while the others were killed
            worker.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keep(self, worker: WorkerProcess, started: Future[str | None], busy: _BusySpan) -> None:
        """Body of a worker's thread. Where samples take no time, one is posted ahead, so that the worker need not wait
        for this thread."""
        started.set_result(worker.start())
        asked: deque[Future[Judgment]] = deque()
        quick, closed = False, False
        while asked or not closed:
            if not closed and len(asked) < (_POSTED_AHEAD if quick else 1):
                with suppress(Empty):
                    if not asked and self._jobs.empty():
                        busy.pause()
                    job = self._jobs.get(block=not asked)
                    closed = job is None
                    if job is not None and job.judgment.set_running_or_notify_cancel():
                        worker.post(job.texts)
                        asked.append(job.judgment)
                    continue
            began = time.monotonic()
            judgment = worker.collect()
            ended = time.monotonic()
            quick = ended - began < _QUICK_S
            busy.scored(began, ended)
            asked.popleft().set_result(judgment)


class _BusySpan:
    """What a worker did without a pause is one span, of up to about a second, however many samples that were."""

    def __init__(self, worker: int) -> None:
        self._lane = f"verifiers/worker {worker}"
        self._began = self._ended = 0.0
        self._samples = 0

    def scored(self, began: float, ended: float) -> None:
        """A sample, by the clock of time.monotonic."""
        if self._samples == 0:
            self._began = began
        self._ended, self._samples = ended, self._samples + 1
        if ended - self._began > _LONGEST_SPAN_S:
            self.pause()

    def pause(self) -> None:
        """The span is over: no sample waits for the worker, or it is long enough."""
        if self._samples:
            spans.note(self._lane, "score", self._began, self._ended, samples=self._samples)
        self._samples = 0


class _Job(NamedTuple):
    """One sample that waits for a worker."""

    texts: bytes
    judgment: Future[Judgment]


def _cannot_import(reward: str, problem: str, sandbox: Sandbox | None) -> str:
    advice = "install the package that holds it, or set the task's reward to another package.module:function"
    if sandbox is None:
        return f"reward {reward!r} cannot be imported: {problem}; {advice}"
    return (
        f"reward {reward!r} cannot be imported in the sandbox ({sandbox.rung}): {problem}; {advice}; docs/sandbox.md "
        "says what the sandbox shows"
    )
