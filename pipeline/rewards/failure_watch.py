"""A reward function that fails is noticed: the first failure of each kind is told, and too many of them end the run.

Too many are more than a function would have by chance that fails as often as it may. A share of a few samples says
little: by that of the last 256 alone, a judge that fails at 5 % where 10 % may ends 18 % of runs within 256 samples,
and 83 % within 100,000.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable

from pipeline.errors import RewardError

_WINDOW = 256
"""Samples over which the share is taken."""
_AT_LEAST = 32
"""Samples that a run scores before it may end: a judge that was late ten times in a row may only be starting."""
_CHANCE = 1e-6
"""Of that many failures, or more, in a function that fails as often as it may."""

_ITS_OWN = frozenset(("raised", "bad_result", "non_finite"))
"""Reasons that are the function's, and not the machine's."""


class FailureWatch:
    """Takes the verdict on each sample, in the order in which they come."""

    def __init__(
        self,
        what: str,
        most: float,
        *,
        at_least: int = _AT_LEAST,
        tell: Callable[[str, str], None] | None = None,
        remedy: str = "correct the function",
    ) -> None:
        """`what` it is that scores, as a message names it. `most`: how often it may fail, 0 to 1.
        `at_least`: samples before that is asked. `tell` gets reason and detail of the first failure of each reason.
        `remedy` is what to do about them."""
        self._remedy = remedy
        self._what, self._most, self._at_least, self._tell = what, most, at_least, tell
        self._recent: deque[bool] = deque(maxlen=_WINDOW)
        self._reasons: Counter[str] = Counter()
        self._first = ""

    def judged(self) -> None:
        """A sample was scored."""
        self._recent.append(False)

    def failed(self, reason: str, detail: str) -> None:
        """A sample was not. Raises RewardError when too many of the last ones were not."""
        self._recent.append(True)
        self._reasons[reason] += 1
        self._first = self._first or f"{reason}: {detail}"
        if self._reasons[reason] == 1 and self._tell is not None:
            self._tell(reason, detail)
        failed, of = sum(self._recent), len(self._recent)
        if of >= self._at_least and failed > self._most * of and _chance(failed, of, self._most) < _CHANCE:
            raise RewardError(
                f"{self._what} failed on {failed} of {of} samples, at most a share of {self._most:g} may; "
                f"the first, {self._first}; {self._remedy}{self._or_bear(failed, of)}"
            )

    def _or_bear(self, failed: int, of: int) -> str:
        """Not where each sample failed by the function itself: no share of failures is worth training on then."""
        return "" if failed == of and self._reasons.keys() <= _ITS_OWN else ", or raise reward.max_failed_share"


def _chance(failed: int, of: int, share: float) -> float:
    """That `failed` or more `of` some samples fail, where each does with this probability."""
    return sum(math.comb(of, n) * share**n * (1.0 - share) ** (of - n) for n in range(failed, of + 1))
