"""Try to import packages in a child process: `python -P -m launch.doctor.imports torch sglang`.

Metadata shows that a package is installed; only an import shows that its libraries are. The child prints a line of JSON
a module, and ends with 1 if a module failed. It needs only the standard library, since packages may be missing.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from threading import Timer

from pipeline.child_process import program_environment

DEADLINE_S = 300.0
"""Longest time of one child. Cold files of torch, Megatron-Core and SGLang on a slow disk take a minute."""


def failed_imports(modules: Sequence[str], deadline_s: float = DEADLINE_S) -> dict[str, str]:
    """Return the modules that this Python cannot import, each with the error in one line.

    A module that ends its process, or hangs, counts as failed; those after it are tried in another process.
    """
    failed: dict[str, str] = {}
    left = list(modules)
    while left:
        command = [sys.executable, "-P", "-m", __name__, *left]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8", env=program_environment()
        ) as child:
            timer = Timer(deadline_s, child.kill)
            timer.start()
            assert child.stdout is not None
            for line in child.stdout:
                # A package may print while it is imported; our lines alone name the next module.
                if line.startswith(f'{{"module": "{left[0]}"'):
                    error = json.loads(line)["error"]
                    if error:
                        failed[left[0]] = error
                    left.pop(0)
                    if not left:
                        break
            timed_out = not timer.is_alive()
            timer.cancel()
        if left:
            how = f"no end of its import after {deadline_s:g} s" if timed_out else f"status {child.returncode}"
            failed[left.pop(0)] = f"its import ended the process ({how})"
    return failed


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    status = 0
    for module in sys.argv[1:]:
        why = ""
        try:
            if module.partition(".")[0] == "sglang":
                # SGLang imports GPU packages everywhere; a machine without them has stubs in their place.
                from rollout_sglang.cpu.stubs import install_stubs

                install_stubs()
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - a package may raise anything while it is imported
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(json.dumps({"module": module, "error": why}), flush=True)
        status |= bool(why)
    sys.exit(status)
