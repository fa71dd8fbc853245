"""Malformed input: some tries of all kinds every day."""

from __future__ import annotations

import pytest

from tests.chaos.ledger import OK
from tests.chaos.malformed import KINDS, kind
from tests.chaos.malformed.tries import run_apart


@pytest.mark.parametrize("name", KINDS)
def test_malformed_input_ends_in_one_line_or_harmlessly(name: str) -> None:
    verdicts = run_apart(name, kind(name).IN_MAKE_TEST)
    assert {seed: verdict for seed, verdict in verdicts.items() if verdict != OK} == {}
    assert len(verdicts) == kind(name).IN_MAKE_TEST
