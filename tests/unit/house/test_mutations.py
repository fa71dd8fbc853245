"""The list of breakages fits the product as it is."""

from __future__ import annotations

from tests.mutations import MUTATIONS, ROOT, check


def test_every_breakage_can_be_applied_and_its_tests_exist() -> None:
    check(MUTATIONS)
    assert [
        test for mutation in MUTATIONS for test in mutation.tests if not (ROOT / test.partition("::")[0]).exists()
    ] == []
    assert all(mutation.old != mutation.new for mutation in MUTATIONS)
