"""YAML within bounds: what is read, what is refused and where, and that what is written is read back."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from precision.text.yaml_data import MOST_BYTES, YamlError, parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", 12),
        ("-1_000", -1000),
        ("4.0e-4", 4e-4),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("true", True),
        ("~", None),
        ("", None),
        ("'12'", "12"),
        ("no", "no"),
        ("012", "012"),
        ("0b_", "0b_"),
        ("0x1f", "0x1f"),
        ("1:30", "1:30"),
        ("2001-99-99", "2001-99-99"),
        ("1e-3", "1e-3"),
        ("=", "="),
        ("{a: &x [1], b: *x}", {"a": [1], "b": [1]}),
        ("{1: a, null: b, true: c}", {"1": "a", "null": "b", "true": "c"}),
        ('"\\t\\n"', "\t\n"),
        (b"\xef\xbb\xbfa: 1", {"a": 1}),
    ],
)
def test_what_is_read(text: str | bytes, expected: Any) -> None:
    assert parse_yaml(text) == expected


def bomb(levels: int) -> str:
    rows = ["a0: &a0 [l,l,l,l,l,l,l,l,l]"]
    rows += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: \xe9", "line 1, column 4: not UTF-8 (byte 0xe9)"),
        ("a: 1\nb: 2".encode("utf-16"), "line 1, column 1: not UTF-8"),
        (b"a: 1\n\xef\xbb\xbf\xff", "line 2, column 2: not UTF-8 (byte 0xff)"),
        ("a: 1\nb: \0", "line 2, column 4: character '\\x00' is not allowed"),
        ("a: \ud800", "line 1, column 4: character '\\ud800' is not allowed"),
        ("a: \ufffe", "line 1, column 4: character '\\ufffe' is not allowed"),
        ('a: "\\0"', "line 1, column 4: the text holds the character '\\x00'"),
        ('"\\ud800": 1', "line 1, column 1: the text holds the character '\\ud800'"),
        ("a: [", "line 1, column 5: not YAML: "),
        ("a: *b", "line 1, column 4: not YAML: found undefined alias"),
        ("a: 1\n--- \nb: 1", "line 2, column 1: not YAML: "),
        ('"\\Uffffffff"', "not YAML: "),
        ("9" * 31, "line 1, column 1: a number of 31 digits, at most 30"),
        ("a: " + "9" * 5000, "line 1, column 4: a number of 5000 digits"),
        ("[" * 33 + "]" * 33, "nested more than 32 levels"),
        ("{a: " * 100_000, "nested more than 32 levels"),
        ("&a [*a]", "nested more than 32 levels"),
        ("- " * 5000, "nested more than 32 levels"),
        (bomb(30), "more than 20000 values, with what aliases stand for"),
        ("[" + "1," * 20_001 + "]", "more than 20000 values"),
        ("a" * (MOST_BYTES + 1), "larger than 1 MiB"),
        ("? [a]\n: b", "line 1, column 3: a key is a list"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: key 'a' is given twice"),
        ("<<: {a: 1}", "merge keys (<<) are not read"),
        ("!!python/object/apply:os.system [true]", "tag '!!python/object/apply:os.system' is not read"),
        ("a: !!binary aaa", "line 1, column 4: tag '!!binary' is not read"),
        ("a: !!timestamp x", "tag '!!timestamp' is not read"),
        ("a: ! b", "tag '!' is not read"),
        (f"%YAML {'9' * 5000}.1\n--- a", "not YAML: "),
    ],
)
def test_what_is_refused_says_where_in_one_short_line(text: str | bytes, message: str) -> None:
    with pytest.raises(YamlError) as refused:
        parse_yaml(text)
    line = str(refused.value)
    assert message in line
    assert len(line) < 300
    assert "\n" not in line


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**29), 10**29) | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    )
)
@example(-(10**29))  # a sign is no digit
def test_what_is_written_is_read_back(value: Any) -> None:
    """A frozen recipe says the same when it is read again. Text that is refused has a character that no recipe has."""
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    found, refusal = value, "a character"
    try:
        found = parse_yaml(text)
    except YamlError as error:
        refusal = str(error)
    assert found == value
    assert "character" in refusal


@given(st.binary(max_size=200) | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    refusal = ""
    try:
        parse_yaml(data)
    except YamlError as error:
        refusal = str(error)
    assert len(refusal) < 400


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(YamlError, match="it is a pipe"):
        read_yaml(tmp_path / "pipe")


def test_an_endless_file_is_read_to_the_bound() -> None:
    with pytest.raises(YamlError, match="larger than 1 MiB"):
        read_yaml(Path("/dev/zero"))
