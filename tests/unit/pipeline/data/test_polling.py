"""Pauses between two looks at a shared file system."""

from __future__ import annotations

from pipeline.data.files import FIRST_POLL_S, slower


def test_what_came_meanwhile_is_seen_soon_and_a_long_wait_asks_seldom() -> None:
    waited_s, pause_s, looks = 0.0, FIRST_POLL_S, 0
    while waited_s < 60.0:
        waited_s, looks = waited_s + pause_s, looks + 1
        assert pause_s <= FIRST_POLL_S + waited_s / 20
        pause_s = slower(pause_s)
    assert looks < 150
    assert pause_s == slower(pause_s) == 1.0
