"""Lines where there is no terminal: nobody waits in silence, and nobody is flooded."""

from __future__ import annotations

import time

import pytest

from launch import terminal as progress
from launch.terminal import going_on, is_due, note_line


@pytest.mark.parametrize(
    ("steps", "passed_s", "due"),
    [
        (0, 9.9, False),
        (0, 10.0, True),
        (1, 2.0, False),
        (1, 2.1, True),
        (3, 6.0, False),
        (3, 6.1, True),
        (9, 8.9, False),
        (9, 9.1, True),
    ],
)
def test_a_line_is_due_every_ten_seconds_and_with_each_slow_step(steps: int, passed_s: float, due: bool) -> None:
    assert is_due(steps, passed_s) == due


def test_a_block_that_says_nothing_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a command what was before it counts: short blocks one after the other make a long silence."""
    monkeypatch.setattr(progress, "EVERY_S", 0.4)
    monkeypatch.setattr(progress, "is_command", True)
    note_line()
    for what in ("checking", "copying", "hashing"):
        with going_on(what):
            time.sleep(0.3)
    said = capsys.readouterr()
    assert said.out == ""
    assert set(said.err.splitlines()) & {"note: copying (0 s)", "note: hashing (0 s)"}
