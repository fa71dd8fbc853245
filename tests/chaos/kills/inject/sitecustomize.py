"""On the PYTHONPATH of a chaos case, so that every Python of the run begins here. Never part of the product."""

from __future__ import annotations

import os
import sys

if "EVENKEEL_CHAOS" in os.environ:
    from tests.chaos.kills import hooks

    hooks.arm(hooks.name_of(sys.orig_argv, os.environ))
