"""No-positive-resampling (ScaleRL, arXiv 2510.13786): problems that are solved too often leave for good.

The pass rate of a problem is over all its samples so far, those of groups dropped for zero variance included. It rests
on the committed batches alone, and for batch b on those below required_version(b): they are committed by the time b
starts, whatever the timing, so a run that is resumed, and an audit, come to the same verdict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.data.records import SOLVED_REWARD, Batch


@dataclass(frozen=True, kw_only=True)
class SolvedPromptRule:
    """When a problem retires: solved in at least this share of its samples, of which there are so many."""

    pass_rate: float
    min_samples: int


@dataclass(frozen=True)
class Attempts:
    """What was tried at one problem."""

    samples: int = 0
    solved: int = 0

    def __add__(self, other: Attempts) -> Attempts:
        return Attempts(self.samples + other.samples, self.solved + other.solved)

    def __str__(self) -> str:
        return f"{self.solved} of {self.samples} samples solved"


class SolvedPromptFilter:
    """Which problems are solved. Batches are recorded in order; without a `solved_rule` none ever is."""

    def __init__(self, solved_rule: SolvedPromptRule | None) -> None:
        self._solved_rule = solved_rule
        self._attempts: dict[int, Attempts] = {}
        self._retired: Mapping[int, Attempts] = {}
        self._later: deque[tuple[int, dict[int, Attempts]]] = deque()
        """(batch, attempts by problem), recorded and not yet counted."""

    def record(self, batch: Batch) -> None:
        """A batch that was committed."""
        if self._solved_rule is not None:
            self._later.append((batch.index, attempts(batch)))

    def solved(self, version: int) -> Mapping[int, Attempts]:
        """Problem → the attempts that made it count as solved, by the batches below `version`, which must not fall from
        call to call. A returned mapping never changes."""
        while self._later and self._later[0][0] < version:
            _, tried = self._later.popleft()
            self._count(tried)
        return self._retired

    def _count(self, tried: Mapping[int, Attempts]) -> None:
        assert self._solved_rule is not None
        leaving = {}
        for problem, more in tried.items():
            total = self._attempts.pop(problem, Attempts()) + more
            if problem in self._retired:
                continue  # for good, however its last samples went
            self._attempts[problem] = total
            enough = total.samples >= self._solved_rule.min_samples
            if enough and total.solved / total.samples >= self._solved_rule.pass_rate:
                leaving[problem] = total
        if leaving:
            self._retired = {**self._retired, **leaving}


def attempts(batch: Batch) -> dict[int, Attempts]:
    """Problem → its samples in one batch, those of dropped groups included; what asked no known problem is left out."""
    problems, members = np.unique(batch.problem, return_inverse=True)
    samples = np.bincount(members, minlength=len(problems)).tolist()
    solved = np.bincount(members, batch.reward >= SOLVED_REWARD, minlength=len(problems)).astype(int).tolist()
    found = {p: Attempts(*counts) for p, *counts in zip(problems.tolist(), samples, solved, strict=True)}
    for drop in batch.dropped:
        if drop.samples:
            found[drop.problem] = found.get(drop.problem, Attempts()) + Attempts(drop.samples, drop.solved)
    found.pop(-1, None)
    return found
