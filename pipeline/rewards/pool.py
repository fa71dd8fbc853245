"""Reward verifiers in processes that can be killed: one that hangs, crashes or raises costs its own sample only.

    score() ──▶ a thread of this process, one a worker ──JSON over a pipe──▶ worker process: reward function

Verifiers are foreign code run on model output: they loop, exhaust memory, call os._exit and take the interpreter down.
So each runs in a spawned process (no torch, no open socket inherited), one sample at a time, with a deadline from the
moment it is handed the sample. A worker that misses it, or dies, is replaced, and the sample gets reward 0 and the part
`verifier_failed`. Nothing is shared between workers (no queue, no lock), so a kill cannot hurt another one's sample.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from pipeline.errors import RecipeError
from pipeline.rewards.verifiers import Judgment, decode_judgment, encode_texts, serve

_log = logging.getLogger(__name__)

_START_DEADLINE_S = 120.0
"""Longest wait for a worker to start Python and import the reward function, on a busy machine."""
_KILL_DEADLINE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A score. `failed` is None, or why there is none: timeout, crashed, raised, non_finite, bad_result."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    failed: str | None = None


class Verifiers:
    """`workers` processes that run one reward function (`package.module:function`, see `pipeline.rewards.verifiers`).

    `failures` counts failed samples by reason. Use it as a context manager, in a program whose `__main__` is guarded:
    workers are spawned.
    """

    def __init__(self, reward: str, workers: int, deadline_s: float) -> None:
        """Starts the workers. Raises RecipeError when the reward function cannot be imported there."""
        self.failures: Counter[str] = Counter()
        self._reward = reward
        self._deadline_s = deadline_s
        self._closed = threading.Event()
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verifier")
        self._workers = [_Worker(reward) for _ in range(workers)]
        problems = [problem for problem in self._threads.map(_Worker.start, self._workers) if problem is not None]
        if problems:
            self.close()
            raise RecipeError(
                f"reward {reward!r} cannot be imported: {problems[0]}; install the package that holds it, or set the "
                "task's reward to another package.module:function"
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
            return Verdict(reward=judgment.reward, parts=judgment.parts)
        self.failures[judgment.failed] += 1
        _log.warning("verifier %s failed (%s): %s", self._reward, judgment.failed, judgment.detail)
        return Verdict(reward=0.0, parts={"verifier_failed": 1.0}, failed=judgment.failed)

    def close(self) -> None:
        """Kill the workers, whatever they are doing."""
        self._closed.set()
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:  # one may have been replaced while the others were killed
            worker.kill()

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
                return Judgment(0.0, {}, "crashed", f"the worker could not be started again: {problem}")
            return worker.ask(prompt, response, answer, self._deadline_s)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process at a time, and the pipe to it. Only `kill` may be called while another thread is in a method."""

    def __init__(self, reward: str) -> None:
        self._reward = reward
        self.alive = False

    def start(self) -> str | None:
        """Start the process and wait until it has imported the reward function. Returns what went wrong, or None."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, self._reward, os.getpid()), name="verifier", daemon=True
        )
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        self.alive = True
        judgment = self._reply(_START_DEADLINE_S)
        return None if judgment.failed is None else judgment.detail

    def ask(self, prompt: str, response: str, answer: str, deadline_s: float) -> Judgment:
        """Run the reward function; a process that does not answer in time is killed."""
        try:
            self._pipe.send_bytes(encode_texts(prompt, response, answer))
        except OSError:
            # It died idle, which is not this sample's doing.
            self.kill()
            if (problem := self.start()) is not None:
                return Judgment(0.0, {}, "crashed", problem)
            self._pipe.send_bytes(encode_texts(prompt, response, answer))
        return self._reply(deadline_s)

    def kill(self) -> None:
        """End the process, if there is one, and wait until it is gone."""
        if self.alive:
            self.alive = False
            self._process.kill()
            self._process.join(_KILL_DEADLINE_S)

    def _reply(self, deadline_s: float) -> Judgment:
        try:
            if self._pipe.poll(deadline_s):
                return decode_judgment(self._pipe.recv_bytes())
            self.kill()
            return Judgment(0.0, {}, "timeout", f"killed after {deadline_s:g} s")
        except (EOFError, OSError):
            self.kill()
            return Judgment(0.0, {}, "crashed", f"its process ended with status {self._process.exitcode}")
