"""What takes rank 0 long keeps no rank waiting in one collective."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from pipeline import background
from pipeline.background import tell_when_done
from pipeline.errors import CorruptCheckpointError
from tests.support.one_rank import OneRank

T = TypeVar("T")


class Counting(OneRank):
    def __init__(self) -> None:
        self.longest_s = 0.0
        self.told = 0

    def tell(self, action: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return super().tell(action)
        finally:
            self.told += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)


def test_a_long_action_is_told_in_short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "ANSWER_S", 0.05)
    learner = Counting()

    def action() -> int:
        time.sleep(0.6)
        return 7

    assert tell_when_done(learner, action) == 7
    assert learner.told > 2


@pytest.mark.parametrize("error", [CorruptCheckpointError("flipped"), TimeoutError("its own")])
def test_what_it_raises_is_raised(error: Exception) -> None:
    def action() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        tell_when_done(OneRank(), action)


def test_none_is_a_result_too() -> None:
    assert tell_when_done(OneRank(), lambda: None) is None
