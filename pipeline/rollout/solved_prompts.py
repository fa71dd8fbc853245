"""No-positive-resampling (ScaleRL, arXiv 2510.13786): a problem that is solved often enough is not asked again.

The pass rate of a problem is over all its samples so far, those of groups dropped for zero variance included. For batch
b it counts the batches below required_version(b) and no others. Those are always committed when b starts. So a run that
is resumed, and an audit, leave out the same problems.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.data.batch import SOLVED_REWARD, Batch, is_solved


@dataclass(frozen=True, kw_only=True)
class SolvedPromptRule:
    """When a problem counts as solved: it has `min_samples` samples, and at least the share `pass_rate` solved it."""

    pass_rate: float
    min_samples: int
    solved_at: float = SOLVED_REWARD
    """The reward of a sample that solved it."""


@dataclass(frozen=True)
class Attempts:
    """Samples of one problem, and how many of them solved it."""

    samples: int = 0
    solved: int = 0

    def __add__(self, other: Attempts) -> Attempts:
        return Attempts(self.samples + other.samples, self.solved + other.solved)


class SolvedPromptFilter:
    """Which problems are solved, by the batches recorded so far, in order. Without a `solved_rule` none ever is."""

    def __init__(self, solved_rule: SolvedPromptRule | None) -> None:
        self._solved_rule = solved_rule
        self._attempts: dict[int, Attempts] = {}
        self._solved: Mapping[int, Attempts] = {}
        self._later: deque[tuple[int, dict[int, Attempts]]] = deque()
        """(batch, attempts by problem), recorded and not yet counted."""

    def record(self, batch: Batch) -> None:
        """A batch that was committed."""
        if self._solved_rule is not None:
            self._later.append((batch.index, attempts(batch, self._solved_rule.solved_at)))

    def solved(self, version: int) -> Mapping[int, Attempts]:
        """Problem → the attempts that made it count as solved, by the batches below `version`.

        `version` must not be lower than in the call before. A returned mapping never changes.
        """
        while self._later and self._later[0][0] < version:
            _, tried = self._later.popleft()
            self._count(tried)
        return self._solved

    def _count(self, tried: Mapping[int, Attempts]) -> None:
        assert self._solved_rule is not None
        newly_solved = {}
        for problem, more in tried.items():
            total = self._attempts.pop(problem, Attempts()) + more
            if problem in self._solved:
                continue  # it stays solved, however later samples went
            self._attempts[problem] = total
            enough = total.samples >= self._solved_rule.min_samples
            if enough and total.solved / total.samples >= self._solved_rule.pass_rate:
                newly_solved[problem] = total
        if newly_solved:
            self._solved = {**self._solved, **newly_solved}


def attempts(batch: Batch, solved_at: float) -> dict[int, Attempts]:
    """Problem → its samples in one batch, those of dropped groups included. Groups of no known problem are left out."""
    problems, members = np.unique(batch.problem, return_inverse=True)
    samples = np.bincount(members, batch.judged, minlength=len(problems)).astype(int).tolist()
    solved = (
        np.bincount(members, batch.judged & is_solved(batch.reward, solved_at), minlength=len(problems))
        .astype(int)
        .tolist()
    )
    found = {p: Attempts(*counts) for p, *counts in zip(problems.tolist(), samples, solved, strict=True)}
    for drop in batch.dropped:
        if drop.samples:
            found[drop.problem] = found.get(drop.problem, Attempts()) + Attempts(drop.samples, drop.solved)
    found.pop(-1, None)
    return found
