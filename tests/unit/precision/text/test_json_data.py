"""JSON from outside: one kind of error for everything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision.text.json_data import JsonError, parse_json, parse_object


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"a": 1}', {"a": 1}),
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        ('"\\ud83d\\ude00"', "😀"),
        ("[" * 100 + "]" * 100, None),
        ("[" + "[]," * 200 + "[]]", None),
    ],
)
def test_what_is_read(text: str | bytes, expected: Any) -> None:
    found = parse_json(text)
    assert expected is None or found == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff", "not UTF-8 at byte 0"),
        (b"", "not JSON (Expecting value at column 1)"),
        (b'{"a": 1', "not JSON"),
        (b'{\n"a": }', "at line 2, column 6"),
        (b"9" * 4301, "more than 4300 digits"),
        (b"[" * 100_000, "nested more than 100 levels"),
        (b"[" * 101 + b"]" * 101, "nested more than 100 levels"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "nested more than 100 levels"),
        (b'"\\ud800"', "half of a surrogate pair"),
        (b'{"\\udfff": 1}', "half of a surrogate pair"),
        (b'{"a": 1, "a": 2}', "key 'a' is given twice"),
    ],
)
def test_what_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(JsonError) as refused:
        parse_json(text)
    assert message in str(refused.value)
    assert len(str(refused.value)) < 300


def test_an_object_is_asked_for() -> None:
    assert parse_object("{}") == {}
    with pytest.raises(JsonError, match=r"it holds \[1\], expected an object"):
        parse_object("[1]")


@given(st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    refusal = ""
    try:
        parse_json(data)
    except JsonError as error:
        refusal = str(error)
    assert len(refusal) < 300
