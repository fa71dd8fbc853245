"""Describe a role's host, hardware, software and source commit, for the event that a role writes at each start."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from collections import Counter
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from launch.build.sizes import active_parameters
from megatron_bridge.hf.model_config import ModelConfig

PACKAGES = ("evenkeel", "torch", "megatron-core", "transformers", "transformer-engine", "numpy", "zarr", "safetensors")
PEAK_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
)
"""Part of a GPU's name and its peak dense bfloat16 TFLOPS (NVIDIA's data sheets)."""
_GPUS = Path("/proc/driver/nvidia/gpus")
_SOURCES = Path(__file__).parents[2]
_GIT_DEADLINE_S = 5.0


def environment(gpus: Path = _GPUS, sources: Path = _SOURCES) -> dict[str, Any]:
    """Return host, hardware and software of this process. It calls no driver, so it cannot hang."""
    names: Counter[str] = Counter()
    for path in sorted(gpus.glob("*/information")):  # from the driver, with a line `Model: NVIDIA H100 …`
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        names.update(line.partition(":")[2].strip() for line in lines if line.startswith("Model:"))
    packages: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return dict(
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        gpus=sorted(names.elements()),
        python=platform.python_version(),
        packages=packages,
        commit=commit_of(sources),
    )


def learner_facts(config: ModelConfig, ranks: int, gpus: list[str]) -> dict[str, Any]:
    """Return the numbers from which GPU utilization is computed. `peak_tflops`, of one GPU, is left out without GPUs,
    for GPUs of several kinds, and for an unknown name."""
    alike = gpus[0].lower() if len(set(gpus)) == 1 else ""
    known = next((dict(peak_tflops=peak) for part, peak in PEAK_TFLOPS if part.lower() in alike), {})
    return dict(ranks=ranks, active_parameters=active_parameters(config), **known)


def commit_of(sources: Path) -> str | None:
    """Return the commit of a git checkout, with `+` if tracked files differ from it; None outside a checkout."""
    if not (sources / ".git").exists():
        return None
    # Without optional locks: others may be at work in the checkout.
    git = partial(
        subprocess.check_output,
        encoding="utf-8",
        errors="replace",
        timeout=_GIT_DEADLINE_S,
        stderr=subprocess.DEVNULL,
    )
    command = ["git", "--no-optional-locks", "-C", str(sources)]
    try:
        head = git([*command, "rev-parse", "--short=12", "HEAD"]).strip()
        changed = git([*command, "status", "--porcelain", "--untracked-files=no"]).strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+" if changed else head
