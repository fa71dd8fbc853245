"""The order of files: the longest first, files that share engines together, no file named that is not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.balance import ENGINES, SECONDS, SHARE_ENGINES, sort_by_length, unit_of

ROOT = Path(__file__).parents[3]


def items(*nodeids: str) -> list[Any]:
    return [SimpleNamespace(nodeid=nodeid) for nodeid in nodeids]


def test_every_file_that_is_named_exists() -> None:
    assert [file for file in (*SECONDS, *SHARE_ENGINES) if not (ROOT / file).is_file()] == []


def test_long_files_come_first_and_tests_keep_their_order() -> None:
    found = items("tests/a.py::b", "tests/a.py::a", "tests/integration/test_broadcast.py::x", *["tests/many.py::c"] * 3)
    sort_by_length(found)
    assert [item.nodeid for item in found] == [
        "tests/integration/test_broadcast.py::x",
        *["tests/many.py::c"] * 3,
        "tests/a.py::b",
        "tests/a.py::a",
    ]


def test_files_that_share_engines_are_one_unit_and_the_one_that_ends_engines_is_last() -> None:
    assert {unit_of(f"{file}::test") for file in SHARE_ENGINES} == {ENGINES}
    found = items(
        *(f"{file}::test" for file in (ENGINES, *SHARE_ENGINES[1:])), "tests/integration/test_bad_input.py::x"
    )
    sort_by_length(found)
    assert [unit_of(item.nodeid) for item in found] == [
        *[ENGINES] * len(SHARE_ENGINES),
        "tests/integration/test_bad_input.py",
    ]
    assert found[len(SHARE_ENGINES) - 1].nodeid.startswith(ENGINES)
