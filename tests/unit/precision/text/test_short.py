"""What messages quote is bounded, on one line, and can always be printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision.text.short import MESSAGE_CHARACTERS, listed, one_line, quoted


class Unsayable:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", "'a'"),
        ("a\nb\x1b[31m", "'a\\nb\\x1b[31m'"),
        ("\ud800", "'\\ud800'"),
        ("x" * 1_000_000, f"'{'x' * 40}'… (1000000 characters)"),
        (None, "None"),
        ([1, 2], "[1, 2]"),
        (list(range(1000)), "[0, 1, 2, 3, 4, 5, ...]"),
        ([10**5000], "a list"),
        (Unsayable(), "<Unsayable instance at"),
    ],
    ids=range(9),
)
def test_quoted(value: object, expected: str) -> None:
    assert quoted(value).startswith(expected)


def test_a_bomb_is_quoted_at_once() -> None:
    bomb: list[object] = ["l"] * 9
    for _ in range(8):
        bomb = [bomb] * 9
    assert len(quoted(bomb)) < 200


def test_one_line() -> None:
    assert one_line("a\n  b\tc\x1b") == "a b c\\x1b"
    assert one_line("\u202egpj.exe") == "\\u202egpj.exe"
    assert one_line("ä → 数") == "ä → 数"
    long = one_line("word " * 10_000)
    assert len(long) <= MESSAGE_CHARACTERS
    assert long.endswith("… (50000 characters in all)")


@pytest.mark.parametrize("limit", [1, 20, 40, 60, 70])
def test_a_long_text_keeps_its_beginning_however_low_the_limit_is(limit: int) -> None:
    line = one_line("abc " * 100, limit)
    assert len(line) <= limit
    assert line.startswith("abc"[: limit - 1])
    assert "…" in line


@given(st.text(st.characters()), st.integers(60, 200))
def test_any_text_becomes_one_bounded_line_that_can_be_encoded(text: str, limit: int) -> None:
    for line in (one_line(text, limit), quoted(text, limit)):
        line.encode()
        assert len(line.splitlines()) <= 1
    assert len(one_line(text, limit)) <= limit


def test_listed() -> None:
    assert listed(["a", "b"]) == "a; b"
    assert listed(list("abcdefg")) == "a; b; c; d; e; and 2 more"
