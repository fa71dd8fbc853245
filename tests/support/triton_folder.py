"""Triton beside the environment, for subprocesses alone.

SGLang takes another path on a CPU when it can import Triton, so `make install` puts Triton into a folder of the
environment that is not on its path. A subprocess gets it by PYTHONPATH: to interpret kernels, or to compile them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.prefix) / "triton"


def run_with_triton(
    module: str, *arguments: str | Path, interpret: bool, cache: Path, deadline_s: float = 200.0
) -> str:
    """Standard output of `python -m module arguments`. What kernels are compiled to is kept in `cache`."""
    assert FOLDER.is_dir(), f"{FOLDER} is missing; run make install"
    variables = {"PYTHONPATH": str(FOLDER), "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**os.environ, **variables, **({"TRITON_INTERPRET": "1"} if interpret else {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=deadline_s,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
