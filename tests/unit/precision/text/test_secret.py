"""A secret is not said, however it is written."""

from __future__ import annotations

from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision.text.secret import without


@pytest.mark.parametrize(
    "written",
    [
        "ab/cd+efgh==",
        "ab%2Fcd%2Befgh%3D%3D",
        "ab/cd%2Befgh%3D%3D",
        "ab%2fcd%2befgh%3d%3d",
        "https://judge/?key=ab%2Fcd%2Befgh%3D%3D&n=1",
    ],
)
def test_percent_encoded_whole_or_in_part(written: str) -> None:
    assert "cd" not in without(written, "ab/cd+efgh==")
    assert without(written, "ab/cd+efgh==", "$KEY").count("$KEY") == 1


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=4))
def test_as_programs_write_it(secret: str) -> None:
    for written in (secret, repr(secret)[1:-1], quote(secret, safe=""), quote_plus(secret)):
        assert without(f"<{written}>", secret) == "<***>"


def test_other_text_stays() -> None:
    assert without(r"a\1 b", "hunter2") == r"a\1 b"
    assert without("x hunter2", "hunter2", r"\1") == r"x \1"
