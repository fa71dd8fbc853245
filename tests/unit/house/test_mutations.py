"""The list of breakages fits the product as it is, and a breakage is applied and taken back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, ROOT, broken, check


def test_every_breakage_can_be_applied_and_its_tests_exist() -> None:
    check(MUTATIONS)
    assert len(MUTATIONS) >= 20
    assert {mutation.file.partition("/")[0] for mutation in MUTATIONS} == {
        *("precision", "pipeline", "megatron_bridge", "rollout_sglang", "launch")
    }
    assert [test for mutation in MUTATIONS for test in mutation.tests if not (ROOT / test).exists()] == []
    assert all(mutation.old != mutation.new for mutation in MUTATIONS)


def test_text_that_is_not_there_or_ambiguous_is_refused() -> None:
    for old, count in (("no such text", 0), ("import", r"\d+")):
        with pytest.raises(ValueError, match=f"stands {count} times in precision/ratios.py, expected once"):
            check([replace(MUTATIONS[0], old=old)])


def test_a_breakage_is_taken_back(tmp_path: Path) -> None:
    mutation = MUTATIONS[0]
    file = tmp_path / mutation.file
    file.parent.mkdir()
    whole = (ROOT / mutation.file).read_text()
    file.write_text(whole)
    with broken(tmp_path, mutation):
        assert mutation.new in file.read_text()
        assert mutation.old not in file.read_text()
    assert file.read_text() == whole
