"""Run `evenkeel doctor`: report what this machine has, what is missing, and what to do about it.

Packages are imported in a child process (launch.doctor.imports), so the report works where packages are broken.
"""

from __future__ import annotations

import importlib.util
import json
import locale
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.doctor.imports import DEADLINE_S, failed_imports
from pipeline.child_process import program_environment
from pipeline.data.files import create_exclusively
from pipeline.errors import EngineStartError, StoreError
from pipeline.importing import REBUILD, how_to_install
from pipeline.nccl import mismatch
from pipeline.rewards.sandbox.choice import choose
from rollout_sglang.server.rollout_python import module_command, module_environment, require_sglang, rollout_python

GIB = 2**30
MIN_MEMORY_GIB, WANTED_MEMORY_GIB = 3.0, 8.0
"""A toy model's engine and learner process on a CPU need just less than the minimum."""
MIN_DISK_GIB, WANTED_DISK_GIB = 1.0, 10.0
WANTED_SHM_MIB = 64
_CAP_IPC_LOCK = 1 << 14
MIN_GLIBC = (2, 28)
"""glibc that the wheels of torch and safetensors need (manylinux_2_28)."""
ENGINE_GLIBC = (2, 34)
"""glibc that SGLang's wheels need."""
_MODULES = {"pyyaml": "yaml", "megatron-core": "megatron.core"}
"""Distribution → module to import, if its name differs."""
Status = Literal["ok", "warn", "fail"]
STYLES: dict[str, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Check:
    """A finding; `advice` is empty if there is nothing to do."""

    name: str
    status: Status
    found: str
    advice: str = ""


def report(checks: Sequence[Check], as_json: bool, title: str = "evenkeel doctor") -> int:
    """Print findings as JSON or as a table, and return the exit code: 1 if a check failed."""
    code = int(any(check.status == "fail" for check in checks))
    if as_json:
        print(json.dumps(dict(ok=code == 0, checks=[asdict(check) for check in checks])))
        return code
    table = Table(title=title, title_justify="left")
    for column in ("check", "status", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(Text(check.name), Text(check.status, STYLES[check.status]), Text(check.found), Text(check.advice))
    Console().print(table)
    return code


def diagnose(runs_root: Path = Path("runs")) -> list[Check]:
    """Return the findings of all checks of this machine."""
    return [
        *check_interpreter(),
        *check_packages(),
        *check_rollout_python(),
        *check_nccl(),
        *check_gpus(),
        *check_room(runs_root),
        *check_locked_memory(),
        check_exclusive_creation(runs_root),
        check_loopback(),
        check_sandbox(),
    ]


def check_interpreter(version: tuple[int, int] = sys.version_info[:2]) -> list[Check]:
    """Check Python, the C library that wheels need, and that prompts and logs can be UTF-8."""
    found = ".".join(map(str, version))
    fits = version in ((3, 11), (3, 12))
    python = Check("python", "ok" if fits else "fail", found, "" if fits else "use Python 3.11 or 3.12")
    name, release = platform.libc_ver()
    numbers = tuple(int(part) for part in release.split(".")[:2]) if name == "glibc" else ()
    if not numbers:
        glibc = Check("glibc", "fail", name or "none", "use a glibc system: torch and SGLang have no musl wheels")
    elif numbers >= ENGINE_GLIBC:
        glibc = Check("glibc", "ok", release)
    else:
        learner = "a learner alone runs here" if numbers >= MIN_GLIBC else "torch needs 2.28"
        wants = "SGLang's wheels need glibc 2.34 (RHEL 9, Ubuntu 22.04, Debian 12), or an image that has it"
        glibc = Check("glibc", "fail", release, f"{wants}; {learner}")
    encoding = locale.getpreferredencoding(do_setlocale=False)
    utf8 = encoding.lower().replace("-", "") == "utf8"
    advice = "" if utf8 else "export LC_ALL=C.UTF-8"
    return [python, glibc, Check("locale", "ok" if utf8 else "warn", encoding, advice)]


def check_packages(distribution: str = "evenkeel") -> list[Check]:
    """Check every direct requirement of Even Keel. The core is required here; learner and engines may run elsewhere."""
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return [Check(distribution, "fail", "not installed", "pip install -e . in the source folder")]
    required = [Requirement(line) for line in lines]
    checks: dict[str, Check] = {}
    for extra in ("", "learner", "rollout"):
        for requirement in required:
            asked = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            if asked and requirement.name != distribution and requirement.name not in checks:
                checks[requirement.name] = check_package(requirement, extra)
    names = {_MODULES.get(name, name.replace("-", "_")): name for name in checks if _version(name) is not None}
    for module, error in failed_imports(list(names)).items():
        checks[names[module]] = Check(names[module], "fail", f"cannot be imported: {error}", REBUILD)
    return list(checks.values())


def check_package(requirement: Requirement, extra: str) -> Check:
    """Check that a package is installed in a version that satisfies the requirement."""
    version, wanted = _version(requirement.name), f"{requirement.name}{requirement.specifier}"
    if version is None:
        if extra:
            return Check(requirement.name, "warn", "not installed", f"needed by the {extra}: pip install '{wanted}'")
        return Check(requirement.name, "fail", "not installed", f"pip install '{wanted}'")
    if requirement.specifier.contains(version, prereleases=True):
        return Check(requirement.name, "ok", version)
    return Check(requirement.name, "warn" if extra else "fail", version, f"pip install '{wanted}'")


def check_rollout_python() -> list[Check]:
    """Check the interpreter of engines and router, if it is not this one."""
    python = rollout_python()
    if python is None:
        return []
    try:
        return [Check("rollout python", "ok", f"{python}: sglang {require_sglang()}")]
    except EngineStartError as error:
        return [Check("rollout python", "fail", python, str(error))]


def check_nccl() -> list[Check]:
    """Compare the releases of NCCL that the learner's torch and the engines' torch load; no finding without one."""
    module = "pipeline.nccl"
    engines = learner = _loaded_nccl([sys.executable, "-P", "-m", module], program_environment())
    if rollout_python() is not None:
        engines = _loaded_nccl(module_command(module), module_environment())
    found = learner if learner == engines else f"{learner or 'none'}, of engines {engines or 'none'}"
    why = mismatch(learner, engines)
    return [Check("nccl", "warn" if why else "ok", found, why)] if found else []


def _loaded_nccl(command: list[str], environment: dict[str, str]) -> str:
    """Return what `python -m pipeline.nccl` prints; empty where torch cannot be imported: another check reports it."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, env=environment, capture_output=True, encoding="utf-8", timeout=DEADLINE_S, check=True
        ).stdout.strip()
    return ""


def check_gpus(devices: Path = Path("/dev")) -> list[Check]:
    """Find NVIDIA GPUs by their device files, since a driver could hang, and check that Transformer Engine, which only
    GPUs need, fits the installed Megatron-Core."""
    gpus = len([path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
    found = (
        f"{gpus} NVIDIA GPU{'s' if gpus > 1 else ''}"
        if gpus
        else "none: learner and engines run on the CPU, at toy sizes"
    )
    accelerator = Check("accelerator", "ok", found)
    name, package = "transformer engine", "transformer_engine"
    if importlib.util.find_spec(package) is None:
        if not gpus:
            return [accelerator, Check(name, "ok", "not installed, not needed on a CPU")]
        advice = how_to_install(package)
        return [accelerator, Check(name, "warn", "not installed: no FP8 training, slower layers", advice)]
    if (version := _version("transformer-engine")) is None:
        advice = "install it as a package, so that its version can be checked"
        return [accelerator, Check(name, "warn", "of unknown version", advice)]
    wanted: list[Requirement] = []
    with suppress(metadata.PackageNotFoundError):
        wanted = [Requirement(line.split(";")[0]) for line in metadata.requires("megatron-core") or []]
    for one in wanted:
        if one.name.replace("_", "-").lower() == "transformer-engine":
            if not one.specifier.contains(version, prereleases=True):
                advice = f"megatron-core asks for {one.specifier}: pip install '{one}'"
                return [accelerator, Check(name, "warn", version, advice)]
            break
    return [accelerator, Check(name, "ok", version)]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_room(runs_root: Path, shared: Path = Path("/dev/shm")) -> list[Check]:
    """Check usable CPUs, free memory, free space for runs, and /dev/shm, in which Gloo, NCCL and SGLang exchange
    tensors. Containers have 64 MiB of /dev/shm by default."""
    usable = len(os.sched_getaffinity(0))
    few = "" if usable >= 2 else "engine and learner take turns; give it 2 or more"
    checks = [Check("cpus", "warn" if few else "ok", f"{usable} usable", few)]
    memory, disk = psutil.virtual_memory().available / GIB, shutil.disk_usage(_existing(runs_root)).free / GIB
    for name, free, least, wanted, advice in (
        ("memory", memory, MIN_MEMORY_GIB, WANTED_MEMORY_GIB, "stop other programs or use a larger machine"),
        ("disk", disk, MIN_DISK_GIB, WANTED_DISK_GIB, f"free space below {runs_root} or set run.root"),
    ):
        found = f"{free:.1f} GiB free"
        if free < least:
            checks.append(Check(name, "fail", found, f"at least {least:g} GiB: {advice}"))
        elif free < wanted:
            checks.append(Check(name, "warn", found, f"{wanted:g} GiB are comfortable: {advice}"))
        else:
            checks.append(Check(name, "ok", found))
    name = "shared memory"
    if not shared.is_dir():
        return [*checks, Check(name, "fail", f"no {shared}", "mount a tmpfs there")]
    size = shutil.disk_usage(shared).total / 2**20
    advice = "" if size >= WANTED_SHM_MIB else "start the container with --shm-size=1g or --ipc=host"
    return [*checks, Check(name, "warn" if advice else "ok", f"{size:,.0f} MiB", advice)]


def check_locked_memory(devices: Path = Path("/dev"), status: Path = Path("/proc/self/status")) -> list[Check]:
    """Check whether this process may pin memory for RDMA devices, if there are any, as NCCL does. The usual limit is
    some MiB. CAP_IPC_LOCK lifts it, but a container's IPC_LOCK gives that to root only."""
    name = "locked memory"
    if not (devices / "infiniband").is_dir():
        return []
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return [Check(name, "ok", "unlimited")]
    found = f"{limit / 2**20:,.3g} MiB"
    lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
    effective = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)  # capabilities(7)
    if effective & _CAP_IPC_LOCK:
        return [Check(name, "ok", f"{found}, and the capability to lock more")]
    advice = (
        "NCCL cannot register memory with the RDMA devices: ulimit -l unlimited; for containers LimitMEMLOCK=infinity "
        "in containerd's unit (docker run --ulimit memlock=-1), for Slurm in slurmd's"
    )
    return [Check(name, "warn", found, advice)]


def check_exclusive_creation(runs_root: Path) -> Check:
    """Check that a second hard link to one name is refused. Otherwise two collectors could commit one batch."""
    name, folder = "exclusive creation", _existing(runs_root)
    remedy = "set run.root to a file system that has hard links"
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as place:
            create_exclusively(Path(place) / "file", "first")
            try:
                create_exclusively(Path(place) / "file", "second")
            except FileExistsError:
                return Check(name, "ok", f"by hard links in {folder}")
    except (OSError, StoreError) as error:
        return Check(name, "fail", f"{folder}: {error}", remedy)
    return Check(name, "fail", f"{folder} creates one file twice", remedy)


def check_loopback() -> Check:
    """Check that 127.0.0.1, where engines listen, accepts connections."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5.0):
                return Check("loopback", "ok", "127.0.0.1 accepts connections")
    except OSError as error:
        return Check("loopback", "fail", str(error), "allow TCP on 127.0.0.1 (sandbox or firewall)")


def check_sandbox() -> Check:
    """Find the sandbox for reward code, by attempts to get out of it."""
    choice = choose()
    reasons = "; ".join(f"{rung}: {reason}" for rung, reason in choice.refused.items())
    if choice.rung is None:
        advice = "only built-in rewards and reward.sandbox: none will run; see docs/sandbox.md"
        return Check("reward sandbox", "warn", f"none ({reasons})", advice)
    if choice.refused:
        advice = "good; with bubblewrap reward code could start processes, too"
        return Check("reward sandbox", "ok", f"{choice.rung} ({reasons})", advice)
    return Check("reward sandbox", "ok", choice.rung)


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that is a folder."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path
