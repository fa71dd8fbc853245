"""Run a module of this package in an interpreter that does not have it: `python -P run_module.py MODULE ARGUMENTS…`.

The folder that holds this package goes to the end of the path: everything else is found where that interpreter has it.
Needs the standard library only. Processes that the module spawns inherit the path.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    module = sys.argv[1]
    del sys.argv[1]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
