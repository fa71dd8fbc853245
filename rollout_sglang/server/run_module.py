"""Run a module of this package in an interpreter that does not have it: `python -P run_module.py MODULE ARGUMENTS…`.

Our packages are found where they lie, and nothing else of that folder: an installed wheel lies beside everything that
the learner's interpreter has, which is not what the engine was built with. Needs the standard library only.

Processes that the module spawns run this file again (multiprocessing runs a parent's `__main__` as `__mp_main__`), and
are equipped by it as their parent was.
"""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType

MODULE_VARIABLE = "EVENKEEL_MODULE"
"""Environment: what the parent of a spawned process has run."""
PACKAGES = ("launch", "megatron_bridge", "pipeline", "precision", "rollout_sglang")
FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Ours:
    """Finds our packages, after everything else was asked."""

    @staticmethod
    def find_spec(
        name: str, _: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.PathFinder.find_spec(name, [FOLDER], target) if name in PACKAGES else None


if __name__ in ("__main__", "__mp_main__"):
    sys.meta_path.append(Ours)
    if __name__ == "__main__":
        os.environ[MODULE_VARIABLE] = sys.argv.pop(1)
    # Not with alter_sys: this file has to stay the `__main__` that spawned processes run.
    globals().update(runpy.run_module(os.environ[MODULE_VARIABLE], run_name=__name__))
