"""Malformed input: 300 tries of all kinds every day, and that the harness notices what it is there for."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.chaos.ledger import OK
from tests.chaos.malformed import kind, present, tries
from tests.chaos.malformed.tries import run_apart, run_tries


@pytest.mark.parametrize("name", present())
def test_malformed_input_ends_in_one_line_or_harmlessly(name: str) -> None:
    verdicts = run_apart(name, kind(name).IN_MAKE_TEST)
    assert {seed: verdict for seed, verdict in verdicts.items() if verdict != OK} == {}
    assert len(verdicts) == kind(name).IN_MAKE_TEST


def hang(seed: int, folder: Path) -> str:
    """Seed 0 raises, 1 spins, 2 dies, 3 sleeps, 4 eats memory, 5 is fine."""
    match seed:
        case 0:
            raise KeyError("x")
        case 1:
            while True:
                pass
        case 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        case 3:
            time.sleep(600)
        case 4:
            return f"{len(bytearray(8 << 30))}"
    return OK


def test_the_harness_sees_tracebacks_hangs_crashes_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tests.chaos.malformed.broken")
    module.attempt, module.prepare = hang, lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(tries, "CPU_DEADLINE_S", 0.3)
    monkeypatch.setattr(tries, "ASLEEP_S", 2.0)
    found = run_tries("broken", range(6))
    assert found[0].startswith("raised KeyError: \"'x'\" in ")
    assert found[1].startswith("past its deadline")
    assert found[2] == "ended its process, with status -11"
    assert found[3].startswith("past its deadline")
    assert found[4].startswith("raised MemoryError")
    assert found[5] == OK
