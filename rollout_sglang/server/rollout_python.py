"""Choose the Python that runs engines and router: this interpreter, or the one named by EVENKEEL_ROLLOUT_PYTHON.

Learner and engine may need different releases of torch or transformers. The other interpreter needs SGLang and none of
our packages: it runs this package's modules from their folder here (run_module.py), and does not get this interpreter's
PYTHONPATH. It may be a script that ends with `exec … python "$@"`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from pipeline.child_process import program_environment
from pipeline.errors import EngineStartError
from pipeline.importing import pip_install
from rollout_sglang.server import run_module

PYTHON_VARIABLE = "EVENKEEL_ROLLOUT_PYTHON"
BESIDE_CPU_EXTRA = ("sglang==0.5.23", "xgrammar==0.2.7")
"""Packages that a CPU installs after the extra `cpu`, without their dependencies: SGLang's include CUDA-only packages,
and xgrammar's include Triton, which SGLang would take for a sign of a GPU."""
_ASK_DEADLINE_S = 60.0
_ASK = """
import json, sys
from importlib import metadata
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(versions))
"""
"""Prints the versions of distributions, without importing them: SGLang's import takes seconds."""


def rollout_python() -> str | None:
    """Return the other interpreter; None when this interpreter runs the engines."""
    return os.environ.get(PYTHON_VARIABLE) or None


def has_router() -> bool:
    """Return whether this interpreter has SGLang's router, which then runs here: it needs nothing of an engine's."""
    return find_spec("sglang_router") is not None


def module_command(module: str, *, here: bool = False) -> list[str]:
    """Return the argv that runs a module of this package, `here` in this interpreter; append the module's arguments."""
    python = rollout_python()
    if python is None or here:
        return [sys.executable, "-P", "-m", module]
    return [python, "-P", str(Path(run_module.__file__)), module]


def module_environment(*, here: bool = False) -> dict[str, str]:
    if rollout_python() is None or here:
        return program_environment()
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def sglang_version() -> str | None:
    """Return the version of SGLang in the interpreter that runs engines; None when it has no SGLang. Raises
    EngineStartError when EVENKEEL_ROLLOUT_PYTHON names no Python."""
    return package_version("sglang")


def package_version(*names: str, here: bool = False) -> str | None:
    """Return the version of the first of these distributions that the interpreter of engines has, or this one (`here`).
    Raises as `sglang_version`."""
    python = None if here else rollout_python()
    if python is not None:
        versions = _versions_in(python, names)
        return next((versions[name] for name in names if name in versions), None)
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


@cache  # each asking starts a Python, for seconds where its files are not in memory yet
def _versions_in(python: str, names: tuple[str, ...]) -> dict[str, str]:
    if shutil.which(python) is None:
        raise EngineStartError(f"{PYTHON_VARIABLE} is {python!r}, expected a Python executable; correct or unset it")
    command = [python, "-P", "-c", _ASK, *names]
    try:
        asked = subprocess.run(
            command,
            env=module_environment(),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_ASK_DEADLINE_S,
            check=True,
        )
        versions: dict[str, str] = json.loads(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = [str(error), *(getattr(error, "stderr", None) or "").strip().splitlines()][-1]
        raise EngineStartError(
            f"{PYTHON_VARIABLE} is {python!r}, which does not run as Python 3.11 or newer ({said}); correct or unset it"
        ) from None
    return versions


def require_sglang() -> str:
    """Return the version of SGLang that engines will run. Raises EngineStartError when there is none."""
    version = sglang_version()
    if version is None:
        raise EngineStartError(
            f"{rollout_python() or sys.executable} has no sglang; {pip_install('sglang', 'sglang-router')} there "
            f"(on a CPU: `make install` in the source folder, or pip install '.[cpu]' and then --no-deps "
            f"{' '.join(BESIDE_CPU_EXTRA)}), or name a Python that has it by {PYTHON_VARIABLE}"
        )
    return version
