"""`evenkeel doctor`: what this machine has, what is missing, and what to do about it.

Metadata says that a package lies there; only an import shows that its libraries do too. Packages are imported in a
child process (`python -P -m launch.doctor.machine torch sglang`), so this works where they are broken.
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
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.doctor.imports import failed_imports
from launch.terminal import going_on
from pipeline.data.files import create_exclusively
from pipeline.errors import EngineStartError, StoreError
from pipeline.importing import REBUILD, how_to_install
from pipeline.rewards.sandbox.choice import choose
from rollout_sglang.server.rollout_python import require_sglang, rollout_python

GIB = 2**30
MIN_MEMORY_GIB, WANTED_MEMORY_GIB = 3.0, 8.0
"""One engine and one learner process of a toy model on a CPU stay below the first only just."""
MIN_DISK_GIB, WANTED_DISK_GIB = 1.0, 10.0
WANTED_SHM_MIB = 64
_CAP_IPC_LOCK = 1 << 14
MIN_GLIBC = (2, 28)
"""What the wheels of torch and safetensors are built against (manylinux_2_28)."""
ENGINE_GLIBC = (2, 34)
"""The same of SGLang's."""

_MODULES = {"pyyaml": "yaml", "megatron-core": "megatron.core"}
"""What is imported of a distribution, where that has another name."""

Status = Literal["ok", "warn", "fail"]
STYLES: dict[str, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Check:
    """One finding. `advice` is empty when nothing is to be done."""

    name: str
    status: Status
    found: str
    advice: str = ""


def run_doctor(as_json: bool, runs_root: Path = Path("runs")) -> int:
    """Print the findings and return the exit code: 1 when something fails."""
    with going_on("importing every package, as a run does (half a minute)"):
        checks = diagnose(runs_root)
    code = int(any(check.status == "fail" for check in checks))
    if as_json:
        print(json.dumps(dict(ok=code == 0, checks=[asdict(check) for check in checks])))
    else:
        Console().print(render(checks))
    return code


def diagnose(runs_root: Path = Path("runs")) -> list[Check]:
    """Every check; never raises for what it finds."""
    return [
        check_python(),
        check_glibc(),
        check_locale(),
        *check_packages(),
        *check_rollout_python(),
        check_accelerator(),
        check_transformer_engine(),
        check_cpus(),
        check_memory(),
        check_disk(runs_root),
        check_shared_memory(),
        *check_locked_memory(),
        check_exclusive_creation(runs_root),
        check_loopback(),
        check_sandbox(),
    ]


def render(checks: list[Check], title: str = "evenkeel doctor") -> Table:
    """One row a check."""
    table = Table(title=title, title_justify="left")
    for column in ("check", "status", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(Text(check.name), Text(check.status, STYLES[check.status]), Text(check.found), Text(check.advice))
    return table


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    """3.11 or 3.12."""
    found = ".".join(map(str, version))
    if version in ((3, 11), (3, 12)):
        return Check("python", "ok", found)
    return Check("python", "fail", found, "use Python 3.11 or 3.12")


def check_glibc() -> Check:
    """Wheels need a recent enough C library."""
    name, version = platform.libc_ver()
    if name != "glibc":
        return Check("glibc", "fail", name or "none", "use a glibc system: torch and SGLang have no musl wheels")
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers >= ENGINE_GLIBC:
        return Check("glibc", "ok", version)
    learner = "a learner alone runs here" if numbers >= MIN_GLIBC else "torch needs 2.28"
    advice = f"SGLang's wheels need glibc 2.34 (RHEL 9, Ubuntu 22.04, Debian 12), or an image that has it; {learner}"
    return Check("glibc", "fail", version, advice)


def check_locale() -> Check:
    """Prompts and logs are UTF-8."""
    encoding = locale.getpreferredencoding(do_setlocale=False)
    if encoding.lower().replace("-", "") == "utf8":
        return Check("locale", "ok", encoding)
    return Check("locale", "warn", encoding, "export LC_ALL=C.UTF-8")


def check_packages(distribution: str = "evenkeel") -> list[Check]:
    """Check every direct requirement of Even Keel. The core must be there; what learner and engines need may be missing
    here when they run elsewhere."""
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
    """Installed, and of a version that satisfies the requirement."""
    version, wanted = _version(requirement.name), f"{requirement.name}{requirement.specifier}"
    if version is None:
        if extra:
            return Check(requirement.name, "warn", "not installed", f"needed by the {extra}: pip install '{wanted}'")
        return Check(requirement.name, "fail", "not installed", f"pip install '{wanted}'")
    if requirement.specifier.contains(version, prereleases=True):
        return Check(requirement.name, "ok", version)
    return Check(requirement.name, "warn" if extra else "fail", version, f"pip install '{wanted}'")


def check_rollout_python() -> list[Check]:
    """Check the interpreter that runs engines and router, where it is another one."""
    python = rollout_python()
    if python is None:
        return []
    try:
        return [Check("rollout python", "ok", f"{python}: sglang {require_sglang()}")]
    except EngineStartError as error:
        return [Check("rollout python", "fail", python, str(error))]


def check_accelerator(devices: Path = Path("/dev")) -> Check:
    """Find NVIDIA devices by their device files. No driver is called, so this cannot hang."""
    gpus = [path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    if gpus:
        return Check("accelerator", "ok", f"{len(gpus)} NVIDIA GPU{'s' if len(gpus) > 1 else ''}")
    return Check("accelerator", "ok", "none: learner and engines run on the CPU, at toy sizes")


def check_transformer_engine(devices: Path = Path("/dev")) -> Check:
    """Needed on GPUs only, in a version that the installed Megatron-Core takes."""
    name, package = "transformer engine", "transformer_engine"
    needed = any(devices.glob("nvidia[0-9]*"))
    if importlib.util.find_spec(package) is None:
        if not needed:
            return Check(name, "ok", "not installed, not needed on a CPU")
        return Check(name, "warn", "not installed: no FP8 training, slower layers", how_to_install(package))
    version, wanted = _version("transformer-engine"), _asked_by("megatron-core", "transformer-engine")
    if version is None:
        return Check(name, "warn", "of unknown version", "install it as a package, so that its version can be checked")
    if wanted is not None and not wanted.specifier.contains(version, prereleases=True):
        return Check(name, "warn", version, f"megatron-core asks for {wanted.specifier}: pip install '{wanted}'")
    return Check(name, "ok", version)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _asked_by(distribution: str, package: str) -> Requirement | None:
    """What a distribution, with all of its extras, requires of a package."""
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return None
    found = (Requirement(line.split(";")[0]) for line in lines)
    return next((one for one in found if one.name.replace("_", "-").lower() == package), None)


def check_cpus() -> Check:
    """CPUs that this process may use, not those that the machine has."""
    usable = len(os.sched_getaffinity(0))
    if usable >= 2:
        return Check("cpus", "ok", f"{usable} usable")
    return Check("cpus", "warn", "1 usable", "engine and learner take turns; give it 2 or more")


def check_memory() -> Check:
    """Memory that is free now."""
    free = psutil.virtual_memory().available / GIB
    return _amount("memory", free, MIN_MEMORY_GIB, WANTED_MEMORY_GIB, "stop other programs or use a larger machine")


def check_disk(runs_root: Path) -> Check:
    """Free space where runs are written."""
    free = shutil.disk_usage(_existing(runs_root)).free / GIB
    return _amount("disk", free, MIN_DISK_GIB, WANTED_DISK_GIB, f"free space below {runs_root} or set run.root")


def check_shared_memory(path: Path = Path("/dev/shm")) -> Check:
    """Check /dev/shm, in which Gloo, NCCL and SGLang exchange tensors. Containers have 64 MiB by default."""
    if not path.is_dir():
        return Check("shared memory", "fail", f"no {path}", "mount a tmpfs there")
    size = shutil.disk_usage(path).total / 2**20
    if size >= WANTED_SHM_MIB:
        return Check("shared memory", "ok", f"{size:,.0f} MiB")
    return Check("shared memory", "warn", f"{size:,.0f} MiB", "start the container with --shm-size=1g or --ipc=host")


def check_locked_memory(devices: Path = Path("/dev"), status: Path = Path("/proc/self/status")) -> list[Check]:
    """Where there are RDMA devices: whether this process may pin memory for them, as NCCL does. The usual limit is some
    MiB. The capability lifts it, but of a container's IPC_LOCK a user other than root gets nothing."""
    name = "locked memory"
    if not (devices / "infiniband").is_dir():
        return []
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return [Check(name, "ok", "unlimited")]
    found = f"{limit / 2**20:,.3g} MiB"
    if _capabilities(status) & _CAP_IPC_LOCK:
        return [Check(name, "ok", f"{found}, and the capability to lock more")]
    advice = (
        "NCCL cannot register memory with the RDMA devices: ulimit -l unlimited; for containers LimitMEMLOCK=infinity "
        "in containerd's unit (docker run --ulimit memlock=-1), for Slurm in slurmd's"
    )
    return [Check(name, "warn", found, advice)]


def _capabilities(status: Path) -> int:
    """The effective ones, a bit each (capabilities(7))."""
    lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


def check_exclusive_creation(runs_root: Path) -> Check:
    """Check that of two files that take one name by a hard link, the second is refused. Otherwise two collectors could
    commit one batch."""
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
    """Engines listen on 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5.0):
                return Check("loopback", "ok", "127.0.0.1 accepts connections")
    except OSError as error:
        return Check("loopback", "fail", str(error), "allow TCP on 127.0.0.1 (sandbox or firewall)")


def check_sandbox() -> Check:
    """What reward code would run in, found by trying to get out of it."""
    choice = choose()
    reasons = "; ".join(f"{rung}: {reason}" for rung, reason in choice.refused.items())
    if choice.rung is None:
        advice = "only built-in rewards and reward.sandbox: none will run; see docs/sandbox.md"
        return Check("reward sandbox", "warn", f"none ({reasons})", advice)
    if choice.refused:
        advice = "good; with bubblewrap reward code could start processes, too"
        return Check("reward sandbox", "ok", f"{choice.rung} ({reasons})", advice)
    return Check("reward sandbox", "ok", choice.rung)


def _amount(name: str, free_gib: float, least: float, wanted: float, advice: str) -> Check:
    found = f"{free_gib:.1f} GiB free"
    if free_gib < least:
        return Check(name, "fail", found, f"at least {least:g} GiB: {advice}")
    if free_gib < wanted:
        return Check(name, "warn", found, f"{wanted:g} GiB are comfortable: {advice}")
    return Check(name, "ok", found)


def _existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path
