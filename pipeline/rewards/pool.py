"""Run reward verifiers in processes that can be killed: one that hangs, crashes or raises costs its own sample only.

    score() ──▶ a thread of this process, one a worker ──verdict pipe──▶ worker ──▶ reward function, confined

Verifiers are foreign code on model output: they loop, exhaust memory and crash the interpreter; some mean harm. So each
runs behind a worker (pipeline.rewards.worker), one sample at a time, with a deadline, in the sandbox of the run
(pipeline.rewards.sandbox). Some functions get several samples at once: a batched one a group, an async one all that
wait (pipeline.rewards.calling). A sample whose verifier fails has no reward, carries the part `verifier_failed`, and is
not trained on. Workers share nothing (no queue, no lock): killing a worker hurts no other sample.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from pipeline import spans
from pipeline.background import beside_loop
from pipeline.data.batch_values import verdict_fault
from pipeline.errors import RecipeError, RewardError
from pipeline.rewards.calling import STARTED_A_PROCESS
from pipeline.rewards.messages import MAX_TEXTS_BYTES, Judgment, encode_samples, failure
from pipeline.rewards.programs import TOLERANCE
from pipeline.rewards.verifiers import MATH_TOLERANCE, TRUSTED
from pipeline.rewards.worker_process import Sandbox, WorkerProcess

_log = logging.getLogger(__name__)

DEFAULT_MEMORY_MIB = 2048
_QUICK_S, _POSTED_AHEAD = 0.02, 4
"""Samples that take less than _QUICK_S are posted _POSTED_AHEAD at a time. None waits behind a slow sample."""


_MOST_TOGETHER_BYTES = MAX_TEXTS_BYTES // 4
_HINTS = (
    (
        re.compile(STARTED_A_PROCESS),
        "; code in the landlock sandbox starts no process: install bubblewrap, under which it may, or for code that "
        "you trust set reward.sandbox to none",
    ),
    (
        re.compile(r"Errno (1|101)\]|Connect|name resolution"),
        "; code in the sandbox has no network: for a judge that you trust set reward.sandbox to none",
    ),
    (re.compile(r"Errno (13|30)\]"), "; docs/sandbox.md says what code in the sandbox may read and write"),
)
"""Patterns of failures in the sandbox, and the advice for each."""
_LONGEST_SPAN_S = 1.0
"""Seconds after which a busy worker's span is recorded."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A score, or its absence: `failed` is None or one of pipeline.rewards.messages.FAILURES."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    failed: str | None = None


class Verifiers:
    """A context manager of `workers` processes that run one reward function (`package.module:function`, see
    `pipeline.rewards.verifiers`). `failures` counts failed samples by reason."""

    def __init__(
        self,
        reward: str,
        workers: int,
        deadline_s: float,
        *,
        sandbox: Sandbox | None,
        memory_mib: int = DEFAULT_MEMORY_MIB,
        watch: FailureWatch | None = None,
        concurrency: int = 1,
        retries: int = 0,
        program_tolerance: float = TOLERANCE,
        math_tolerance: float = MATH_TOLERANCE,
    ) -> None:
        """Start the workers. Raises RecipeError when a worker cannot import the function. An async function has up to
        `concurrency` samples under way in each worker. HTTP errors that may pass are retried up to `retries` times.
        `program_tolerance` is for `python_tests`, `math_tolerance` for `math_verify`. Without a sandbox reward code
        runs with this user's rights; built-in rewards that run no foreign code always do."""
        self.failures: Counter[str] = Counter()
        self._reward, self._watch, self._concurrency = reward, watch, concurrency
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        used = None if reward in TRUSTED else sandbox
        self._confined = used is not None
        self._workers = [
            WorkerProcess(reward, deadline_s, memory_mib, used, retries, program_tolerance, math_tolerance)
            for _ in range(workers)
        ]
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
            where = "" if used is None else f" in the sandbox ({used.rung})"
            page = "" if used is None else "; docs/sandbox.md says what the sandbox shows"
            raise RecipeError(
                f"reward {reward!r} cannot be imported or called{where}: {problems[0]}; correct it, install its "
                f"package, or set the task's reward to another package.module:function{page}"
            )
        self.wants = self._workers[0].wants

    async def score(
        self, prompt: str, response: str, answer: str, metadata: Mapping[str, Any] = MappingProxyType({})
    ) -> Verdict:
        (verdict,) = await self.score_group(prompt, answer, metadata, [response])
        return verdict

    async def score_group(
        self,
        prompt: str,
        answer: str,
        metadata: Mapping[str, Any],
        responses: Sequence[str],
        info: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Verdict]:
        """Return the verdicts on the responses to one prompt, after waiting for a free worker. `info` describes each
        response (default: one of a single token). A verifier that fails costs its sample, a batched one its group.
        Raises RewardError when the watch, if there is one, has seen too many failures."""
        known: Sequence[Mapping[str, Any]] = [{}] * len(responses)
        if "info" in self.wants:
            told = info or [dict(prompt_tokens=1, response_tokens=1, finish="stop")] * len(responses)
            # The request of a group holds it already.
            group = {} if "batched" in self.wants else dict(group=list(responses))
            known = [{**one, "index": index, **group} for index, one in enumerate(told)]
        samples = [(prompt, response, answer, metadata, one) for response, one in zip(responses, known, strict=True)]
        # With `info` each sample holds its whole group, where it is not judged together with it.
        texts = await beside_loop(encode_samples, samples) if "info" in self.wants else encode_samples(samples)
        if "batched" in self.wants:
            judgments = await self._judged(texts)
        else:
            judgments = [one for (one,) in await asyncio.gather(*(self._judged([text]) for text in texts))]
        return [self._verdict(judgment) for judgment in judgments]

    async def _judged(self, texts: Sequence[bytes]) -> list[Judgment]:
        if (size := sum(map(len, texts))) > MAX_TEXTS_BYTES:
            what = "a sample" if len(texts) == 1 else "a group"
            too_large = failure("too_large", f"{what} of {size} bytes, expected at most {MAX_TEXTS_BYTES}")
            return too_large.of_each(len(texts))
        job = _Job(texts, Future())
        self._jobs.put(job)
        return await asyncio.wrap_future(job.judgments)

    def _verdict(self, judgment: Judgment) -> Verdict:
        if judgment.failed is None:
            fault = verdict_fault(judgment.reward, judgment.parts)
            if fault is None:
                if self._watch is not None:
                    self._watch.judged()
                # Round to what a batch stores, so that digits below it decide nothing.
                parts = {name: float(np.float32(part)) for name, part in judgment.parts.items()}
                return Verdict(reward=float(np.float32(judgment.reward)), parts=parts)
            judgment = failure("bad_result", fault)
        assert judgment.failed is not None
        self.failures[judgment.failed] += 1
        hints = [hint for seen, hint in _HINTS if self._confined and seen.search(judgment.detail)]
        detail = judgment.detail + "".join(hints[:1])
        if self._watch is not None:
            self._watch.failed(judgment.failed, detail)
        _log.warning("verifier %s failed (%s): %s", self._reward, judgment.failed, detail)
        return Verdict(reward=0.0, parts={"verifier_failed": 1.0}, failed=judgment.failed)

    def close(self) -> None:
        with suppress(Empty):
            while job := self._jobs.get_nowait():
                job.judgments.cancel()
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
        """Serve one worker, as the body of its thread. Quick samples are posted ahead, so that the worker need not wait
        for this thread. An error here fails the samples under way, but never ends the thread."""
        try:
            started.set_result(worker.start())
        except Exception as error:  # noqa: BLE001 - reported by the waiting thread
            started.set_result(f"{type(error).__name__}: {error}")
        asked: deque[list[_Job]] = deque()
        alone: deque[_Job] = deque()
        quick, closed = False, False
        while asked or alone or not closed:
            try:
                may_ask = len(asked) < (_POSTED_AHEAD if quick else 1)
                jobs = [alone.popleft()] if may_ask and alone else []
                if may_ask and not jobs and not closed:
                    with suppress(Empty):
                        if not asked and self._jobs.empty():
                            busy.pause()
                        waiting = [self._jobs.get(block=not asked)]
                        # Take as many more as an async function may have under way. None ends the worker.
                        size = len(waiting[0].texts[0]) if waiting[0] else 0
                        with suppress(Empty):
                            while "concurrent" in worker.wants and waiting[-1] and len(waiting) < self._concurrency:
                                if size > _MOST_TOGETHER_BYTES:
                                    break
                                waiting.append(self._jobs.get_nowait())
                                size += len(waiting[-1].texts[0]) if waiting[-1] else 0
                        closed = None in waiting
                        # Drop cancelled jobs; from here on none can be cancelled.
                        jobs = [job for job in waiting if job and job.judgments.set_running_or_notify_cancel()]
                        if not jobs:
                            continue
                if jobs:
                    asked.append(jobs)
                    worker.post(*(text for job in jobs for text in job.texts))
                    continue
                quick = _collect(worker, asked, alone, busy)
            except Exception as error:  # noqa: BLE001 - reported by the judgments
                _log.exception("a worker of verifier %s is given up", self._reward)
                with suppress(Exception):
                    worker.forget()
                broken = failure("crashed", f"its worker could not be asked: {type(error).__name__}: {error}")
                while asked:
                    for job in asked.popleft():
                        job.judgments.set_result(broken.of_each(len(job.texts)))


class _BusySpan:
    """A span of a worker's work without a pause, up to about a second, however many samples it holds."""

    def __init__(self, worker: int) -> None:
        self._lane = f"verifiers/worker {worker}"
        self._began = self._ended = 0.0
        self._samples = 0

    def scored(self, began: float, ended: float, samples: int) -> None:
        if self._samples == 0:
            self._began = began
        self._ended, self._samples = ended, self._samples + samples
        if ended - self._began > _LONGEST_SPAN_S:
            self.pause()

    def pause(self) -> None:
        """Record the span: no sample waits for the worker, or the span is long enough."""
        if self._samples:
            spans.note(self._lane, "score", self._began, self._ended, samples=self._samples)
        self._samples = 0


class _Job(NamedTuple):
    """A sample, or the group of a batched function, that waits for a worker."""

    texts: Sequence[bytes]
    judgments: Future[list[Judgment]]


def _collect(worker: WorkerProcess, asked: deque[list[_Job]], alone: deque[_Job], busy: _BusySpan) -> bool:
    """Deliver the judgments on the oldest request and return whether it was quick. If several samples were under way
    and one may have ended the process, queue each of them again, alone."""
    began = time.monotonic()
    judgment = worker.collect()
    ended = time.monotonic()
    count = sum(len(job.texts) for job in asked[0])
    of_each = iter(judgment.of_each(count))
    busy.scored(began, ended, count)
    done = asked.popleft()
    if len(done) > 1 and judgment.failed is not None and not judgment.rest:
        alone.extend(done)
        return False
    for job in done:
        job.judgments.set_result([next(of_each) for _ in job.texts])
    return ended - began < _QUICK_S


_WINDOW = 256
"""Latest samples among which failures are counted."""
_AT_LEAST = 32
"""Samples that a run scores before failures may end it: a judge that is late ten times may be starting."""
_CHANCE = 1e-6
"""Probability below which a number of failures, or more, ends the run."""

_ITS_OWN = frozenset(("raised", "bad_result", "non_finite"))
"""Reasons that lie in the function, not in the machine."""


class FailureWatch:
    """A count of failures among the latest verdicts, which ends a run with too many."""

    def __init__(
        self,
        what: str,
        most: float,
        *,
        at_least: int = _AT_LEAST,
        tell: Callable[[str, str], None] | None = None,
        remedy: str = "correct the function",
    ) -> None:
        """Set the limits. `what`: the scorer's name. `most`: share that may fail, 0 to 1. `at_least`: samples before
        failures may end the run. `tell` gets reason and detail of each reason's first failure. `remedy`: advice."""
        self._remedy = remedy
        self._what, self._most, self._at_least, self._tell = what, most, at_least, tell
        self._recent: deque[bool] = deque(maxlen=_WINDOW)
        self._reasons: Counter[str] = Counter()
        self._first = ""

    def judged(self) -> None:
        self._recent.append(False)

    def failed(self, reason: str, detail: str) -> None:
        """Count a sample that was not scored. Raises RewardError when too many of the latest were not."""
        self._recent.append(True)
        self._reasons[reason] += 1
        self._first = self._first or f"{reason}: {detail}"
        if self._reasons[reason] == 1 and self._tell is not None:
            self._tell(reason, detail)
        failed, of = sum(self._recent), len(self._recent)
        if of < self._at_least or failed <= self._most * of:
            return
        # The probability of this many failures or more, if each sample fails with the allowed probability.
        chances = (math.comb(of, n) * self._most**n * (1.0 - self._most) ** (of - n) for n in range(failed, of + 1))
        if sum(chances) < _CHANCE:
            # Where each sample failed by the function itself, no share of failures is worth training on.
            hopeless = failed == of and self._reasons.keys() <= _ITS_OWN
            or_bear = "" if hopeless else ", or raise reward.max_failed_share"
            raise RewardError(
                f"{self._what} failed on {failed} of {of} samples, at most a share of {self._most:g} may; "
                f"the first, {self._first}; {self._remedy}{or_bear}"
            )
