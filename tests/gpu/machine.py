"""Which machine, which versions, which sources: read without loading torch, so that no GPU memory is taken."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from rollout_sglang.server.rollout_python import module_environment, rollout_python

ROOT = Path(__file__).parents[2]
SOURCES = ("precision", "pipeline", "megatron_bridge", "rollout_sglang", "launch", "tests/gpu")
DISTRIBUTIONS = ("torch", "triton", "transformer-engine", "megatron-core", "numpy", "transformers")
QUERY = ("name", "driver_version", "memory.total", "clocks.sm", "power.limit")
ASK_DEADLINE_S = 30.0


def describe_machine() -> dict[str, Any]:
    """device (the GPU's name, or `CPU`), what nvidia-smi says of it, cores and memory of the host."""
    said = _said(["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]).splitlines()
    fields = [field.strip() for field in said[0].split(",")] if said else []
    gpu = dict(zip(QUERY, fields, strict=True)) if len(fields) == len(QUERY) else {}
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "device": gpu.get("name", "CPU"),
        **{name.replace(".", "_"): value for name, value in gpu.items() if name != "name"},
        "gpus": len(said),
        "cores": os.cpu_count(),
        "host_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
    }


def describe_versions() -> dict[str, str]:
    """Of Python and of what learner and engine are made of; `missing` where it is not installed."""
    versions = {"python": platform.python_version()} | {name: _version(name) for name in DISTRIBUTIONS}
    engine = rollout_python() or sys.executable
    asked = "from importlib.metadata import version as v; print(v('sglang'), v('torch'), v('transformers'))"
    found = _said([engine, "-c", asked], module_environment()).split()
    names = ("sglang", "engine torch", "engine transformers")
    return versions | dict(zip(names, found if len(found) == len(names) else ["missing"] * len(names), strict=True))


def describe_sources() -> str:
    """The commit where git knows it, and a digest of the sources themselves, which also a copy without git has."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    commit = _said(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]).strip() or "no git"
    return f"{commit}, sources {digest.hexdigest()[:12]}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "missing"


def _said(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Standard output; empty when the program is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=ASK_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
