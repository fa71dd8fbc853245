"""For all tests: no property test fails because the machine is busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("evenkeel", deadline=None)
settings.load_profile("evenkeel")
