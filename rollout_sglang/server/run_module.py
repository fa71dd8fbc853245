"""Run a module of this package in an interpreter that does not have it: `python -P run_module.py MODULE ARGUMENTS…`.

Only our packages are importable from their folder: in an installed wheel, it holds all packages of the learner's
interpreter, and the engine was built with others. This file needs only the standard library. Processes that the module
spawns run it again (multiprocessing runs a parent's `__main__` as `__mp_main__`), so that they find our packages too.
"""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType

MODULE_VARIABLE = "EVENKEEL_MODULE"
"""Environment variable with the module that the parent of a spawned process runs."""
PACKAGES = ("launch", "megatron_bridge", "pipeline", "precision", "rollout_sglang")
FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Ours:
    """A finder of our packages, after all other finders."""

    @staticmethod
    def find_spec(
        name: str, _: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.PathFinder.find_spec(name, [FOLDER], target) if name in PACKAGES else None


if __name__ in ("__main__", "__mp_main__"):
    sys.meta_path.append(Ours)
    if __name__ == "__main__":
        os.environ[MODULE_VARIABLE] = sys.argv.pop(1)
    # Not with alter_sys: spawned processes must run this file as their `__main__`.
    globals().update(runpy.run_module(os.environ[MODULE_VARIABLE], run_name=__name__))
