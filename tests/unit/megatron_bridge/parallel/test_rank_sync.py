"""What rank 0 tells the others, when that takes it long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from megatron_bridge.parallel.rank_sync import RankSync
from pipeline import background
from pipeline.background import tell_when_done


class Alone(RankSync):
    """Rank 0 of 1, without a process group."""

    def __init__(self) -> None:
        self.is_rank_zero = True
        self.longest_s, self.told = 0.0, 0

    def tell(self, action: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            return action()
        finally:
            self.told += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)


@pytest.mark.parametrize("result", [7, None])
def test_a_long_action_is_told_in_short_answers(monkeypatch: pytest.MonkeyPatch, result: int | None) -> None:
    monkeypatch.setattr(background, "ANSWER_S", 0.05)
    alone = Alone()

    def action() -> int | None:
        time.sleep(0.5)
        return result

    assert tell_when_done(alone, action) == result
    assert alone.told > 2
    assert alone.longest_s < 0.5


def test_what_it_raises_is_raised() -> None:
    def action() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        tell_when_done(Alone(), action)
