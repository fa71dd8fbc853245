"""How many examples a property test draws: all of them in `make test-slow`, a fifth of them every day.

HYPOTHESIS_PROFILE chooses. Both profiles draw the same examples on every machine, so that a failure is a failure of the
change under test; `pytest --hypothesis-seed=…` explores others.
"""

from __future__ import annotations

import os
from typing import Literal

from hypothesis import HealthCheck, settings

FEWEST = 6


def register_profiles() -> None:
    """Load the profile that HYPOTHESIS_PROFILE names. No property test fails because the machine is busy."""
    for name, count in (("everyday", 15), ("thorough", 100)):
        settings.register_profile(
            name, deadline=None, derandomize=True, max_examples=count, suppress_health_check=[HealthCheck.too_slow]
        )
    settings.load_profile(profile())


def profile() -> Literal["everyday", "thorough"]:
    return "thorough" if os.environ.get("HYPOTHESIS_PROFILE", "everyday") == "thorough" else "everyday"


def examples(count: int) -> int:
    """Of `count` examples, those that the profile draws."""
    return count if profile() == "thorough" else min(count, max(FEWEST, count // 5))
