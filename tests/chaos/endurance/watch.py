"""What the processes of a run hold, looked at from outside: /proc, /dev/shm, the temporary folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_ROLE = re.compile(r" role (\w+) \S+ ?(\d*)")


def names(top: psutil.Process) -> dict[str, psutil.Process]:
    """The processes of a run by what they are: the supervisor `top` and all below it."""
    found = {"supervisor": top}
    for process in top.children(recursive=True):
        with suppress(psutil.Error):
            name = name_of(process.cmdline())
            while name in found:  # several of a kind
                name += "+"
            found[name] = process
    return found


def name_of(argv: Sequence[str]) -> str:
    """A short name for a command line."""
    line = " ".join(argv)
    if match := _ROLE.search(line):
        return f"{match[1]}{match[2]}"
    for words, name in (
        ("torchrun", "torchrun"),
        ("launch.run.torchrun", "torchrun"),
        ("learn_rank", "rank"),
        ("scheduler", "scheduler"),
        ("detokenizer", "detokenizer"),
        ("cpu_server", "engine"),
        ("launch_router", "router-server"),
        ("router", "router-server"),
        ("bwrap", "sandbox"),
        ("pipeline.rewards", "verifier"),
        ("resource_tracker", "resource-tracker"),
        ("spawn_main", "verifier"),
    ):
        if words in line:
            return name
    return "other"


def holdings(process: psutil.Process) -> dict[str, float]:
    """Memory in KiB, descriptors, threads. Raises psutil.Error when it has ended."""
    with process.oneshot():
        if process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.ZombieProcess(process.pid)
        return dict(
            rss_kib=process.memory_info().rss / 1024,
            anon_kib=anonymous_kib(process.pid),
            descriptors=process.num_fds(),
            threads=process.num_threads(),
        )


def anonymous_kib(pid: int) -> float:
    """Resident memory that is no file's: what other processes share of a file comes and goes with them. Raises
    psutil.NoSuchProcess."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        raise psutil.NoSuchProcess(pid) from None
    return sum(float(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def files(shm: Path, tmp: Path, run: Path) -> dict[str, float]:
    """What lies in shared memory and in the temporary folder, and unfinished files of the run."""
    shared, left = list(_sizes(shm)), list(_sizes(tmp))
    temporary = [path for path in _walk(run) if path.name.endswith(".tmp")]
    return dict(shm_kib=sum(shared) / 1024, shm_files=len(shared), tmp_files=len(left), temporaries=len(temporary))


def kinds(run: Path) -> Mapping[str, int]:
    """Files in each folder of a run."""
    return {entry.name: sum(1 for _ in _walk(entry)) for entry in sorted(run.iterdir()) if entry.is_dir()}


def _sizes(folder: Path) -> Iterator[int]:
    for path in _walk(folder):
        with suppress(OSError):
            yield path.lstat().st_size


def _walk(folder: Path) -> Iterator[Path]:
    for place, _, found in os.walk(folder):
        yield from (Path(place) / name for name in found)
