"""The rungs of the sandbox, for tests. A machine that lacks one skips its tests and says why (`pytest -ra`)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from pipeline.rewards.sandbox.choice import LEAKS, what_is_wrong_with
from pipeline.rewards.sandbox.confine import Rung, landlock_version
from pipeline.rewards.worker_process import Sandbox

OLDEST_LANDLOCK = "landlock of Linux 5.13"
"""Version 1 of its interface: no limit on signals, truncation, TCP. What it lacks the filter of system calls holds."""
EVERY_RUNG = ("bubblewrap", "landlock", OLDEST_LANDLOCK)

_what_is_wrong_with = cache(what_is_wrong_with)


def sandbox_of(name: str, *hidden: Path) -> Sandbox:
    """A sandbox on the rung of this name. Skips the test where this machine has none; one that leaks is no reason."""
    rung: Rung = "bubblewrap" if name == "bubblewrap" else "landlock"
    problem = _what_is_wrong_with(rung)
    assert problem is None or not problem.startswith(LEAKS), problem
    if problem is not None:
        pytest.skip(f"no {rung} here: {problem}")
    sandbox = Sandbox(rung=rung, landlock_abi=landlock_version(), hidden=hidden)
    return replace(sandbox, landlock_abi=1) if name == OLDEST_LANDLOCK else sandbox
