"""How a worker scores by a reward of ours that runs no code of others: it calls the function itself.

A process less takes part than with foreign code. The run keeps the deadline and kills the worker: a function that
computes in C lets no thread of its own process run. The kernel ends the worker with the run, and limits its memory.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.child_process import die_with_parent
from pipeline.rewards.calling.judge import judge, resolve
from pipeline.rewards.children import RunIsGoneError
from pipeline.rewards.judgment import Judgment, decode_texts, failure
from pipeline.rewards.verifiers import MATH_VERIFY


class BuiltInJudge:
    """One reward function, called in this process."""

    def __init__(
        self, reward: str, memory_bytes: int, *, path: Sequence[str], folder: Path, run_pid: int, tolerance: float
    ) -> None:
        """`run_pid`: of the process that started this one, with which it ends. `tolerance`: of `math_verify`."""
        self._reward = reward
        self._memory_bytes = memory_bytes
        self._path = path
        self._folder = folder
        self._run_pid = run_pid
        self._tolerance = tolerance
        self._used = False

    def start(self) -> Judgment | None:
        """Import the reward function. Returns what is wrong, or None."""
        die_with_parent(self._run_pid)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = self._memory_bytes if hard == resource.RLIM_INFINITY else min(self._memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
        os.chdir(self._folder)
        sys.path[:] = self._path
        try:
            resolve(self._reward)
            if self._reward == MATH_VERIFY:
                importlib.import_module(
                    "pipeline.rewards.mathematics"
                )  # a second: not within the deadline of the first sample
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever an import raised is the answer
            return failure("raised", f"{type(error).__name__}: {error}")
        os.dup2(0, 2)  # libraries warn there, and nobody reads it any more: a full pipe would hold them up
        return None

    def judge(self, texts: bytes) -> Judgment:
        """The verdict on one sample. Raises RunIsGoneError when there is not enough memory and earlier samples may have
        used it up: a fresh worker is asked again."""
        samples = [{**sample, "tolerance": self._tolerance} for sample in decode_texts(texts)]
        judgment = judge(self._reward, samples)
        was_used, self._used = self._used, True
        if judgment.failed == "memory" and was_used:
            raise RunIsGoneError(judgment.detail)
        return judgment
