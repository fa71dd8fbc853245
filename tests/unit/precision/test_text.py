"""Text from outside is read or refused in one line, and quoted within bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from precision.text import (
    MESSAGE_CHARACTERS,
    MOST_BYTES,
    JsonError,
    YamlError,
    dump_yaml,
    one_line,
    parse_json,
    parse_object,
    parse_yaml,
    quoted,
    read_yaml,
    without,
)


class Unsayable:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a\nb\x1b[31m", "'a\\nb\\x1b[31m'"),
        ("\ud800", "'\\ud800'"),
        ("x" * 1_000_000, f"'{'x' * 40}'… (1000000 characters)"),
        (list(range(1000)), "[0, 1, 2, 3, 4, 5, ...]"),
        ([10**5000], "a list"),
        (Unsayable(), "<Unsayable instance at"),
    ],
    ids=range(6),
)
def test_quoted(value: object, expected: str) -> None:
    assert quoted(value).startswith(expected)


def test_one_line() -> None:
    assert one_line("a\n  b\tc\x1b") == "a b c\\x1b"
    assert one_line("\u202egpj.exe") == "\\u202egpj.exe"
    long = one_line("word " * 10_000)
    assert len(long) <= MESSAGE_CHARACTERS
    assert long.endswith("… (50000 characters in all)")
    assert one_line("abc " * 100, 20).startswith("abc")


@given(st.text(st.characters()), st.integers(60, 200))
def test_any_text_becomes_one_bounded_line_that_can_be_encoded(text: str, limit: int) -> None:
    for line in (one_line(text, limit), quoted(text, limit)):
        line.encode()
        assert len(line.splitlines()) <= 1
    assert len(one_line(text, limit)) <= limit


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=4))
@example("ab/cd+efgh==")
def test_a_secret_is_not_said_however_programs_write_it(secret: str) -> None:
    for written in (secret, repr(secret)[1:-1], quote(secret, safe=""), quote_plus(secret)):
        assert without(f"<{written}>", secret) == "<***>"
    assert without("ab/cd%2Befgh%3D%3d", "ab/cd+efgh==", "$KEY") == "$KEY"
    assert without(r"a\1 x hunter2", "hunter2", r"\1") == r"a\1 x \1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: 1\nb: \xe9", "line 2: not UTF-8 (byte 0xe9)"),
        ("a: \0", "#x0000"),
        ('a: "\\0"', "line 1, column 4: the text holds the character '\\x00'"),
        ("a: [", "line 1, column 5: "),
        ("\ta: 1", "indent with spaces"),
        ("a: 1\n--- \nb: 1", "line 2, column 1: "),
        ("a: " + "9" * 5000, "not YAML: "),
        ("[" * 30_000, "nested too deep"),
        ("a" * (MOST_BYTES + 1), "larger than 1 MiB"),
        ("? [a]\n: b", "line 1, column 3: a key is a list"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: key 'a' is given twice"),
        ("a: !!python/object:os.system 1", "line 1, column 4: not YAML: could not determine a constructor"),
        ("a: !!timestamp noon", "a tag such as !!timestamp does not fit its value"),
    ],
    ids=range(13),
)
def test_what_yaml_cannot_mean_is_refused_with_its_place(text: str | bytes, message: str) -> None:
    with pytest.raises(YamlError) as refused:
        parse_yaml(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_device_without_an_end_is_refused() -> None:
    with pytest.raises(YamlError, match="larger than 1 MiB"):
        read_yaml(Path("/dev/zero"))


@pytest.mark.parametrize(("line", "message"), [("a: b", "key 'a' is given twice"), ("- a", "over 100,000 values")])
def test_a_large_document_is_refused_before_it_is_parsed_to_its_end(line: str, message: str) -> None:
    """To parse 1 MiB takes seconds: of this one, the end is no YAML."""
    with pytest.raises(YamlError, match=message):
        parse_yaml(f"{line}\n" * ((MOST_BYTES - 2) // (len(line) + 1)) + "[")


def test_aliases_that_hold_millions_are_refused() -> None:
    lines = ["a: &a [" + ",".join("1" * 10) + "]"]
    for name, below in zip("bcdef", "abcde", strict=True):
        lines.append(f"{name}: &{name} [" + ",".join([f"*{below}"] * 10) + "]")
    for text in ("\n".join(lines), "&a [*a]"):
        with pytest.raises(YamlError, match="aliases"):
            parse_yaml(text)
    assert parse_yaml("a: &a [1, 2]\nb: *a") == {"a": [1, 2], "b": [1, 2]}


scalars = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False)
words = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\x85\u2028\u2029\ufeff\ufffe\uffff"))


@given(st.recursive(scalars | words, lambda inner: st.lists(inner) | st.dictionaries(words, inner), max_leaves=10))
@example({"a": "1e5", "b": "0o14", "c": "<<", "d": ".5e3", "e": "+1e3", "f": "="})
def test_what_is_written_is_read_as_it_was(data: Any) -> None:
    assert parse_yaml(dump_yaml(data)) == data


@given(st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for parse, refusal in ((parse_yaml, YamlError), (parse_json, JsonError)):
        told = ""
        try:
            parse(data)
        except refusal as error:
            told = str(error)
        assert len(told) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff", "not UTF-8 at byte 0"),
        (b'{\n"a": }', "line 2 column 6"),
        (b"9" * 4301, "4300 digits"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"\\udfff": 1}', "surrogates not allowed"),
        (b"[1]", "expected an object"),
    ],
)
def test_what_json_cannot_mean_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(JsonError, match=message):
        parse_object(text)
    assert parse_json('"\\ud83d\\ude00"') == "😀"
