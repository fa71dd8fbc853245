"""What was measured between hosts → a finding, with what to do about it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from launch.doctor.machine import GIB, MIN_DISK_GIB, WANTED_DISK_GIB, Check, Status

SOON_S = 2.0
"""A change that is seen within this time delays a run by less than a step takes."""
CLOCK_S = 1.0
FSYNC_S = 0.2
ANOTHER = "put the run on another file system (NFS 4, Lustre, GPFS, CephFS)"
CACHES = (
    "every publish and every batch is seen that much later; mount with short attribute caching: NFS "
    "actimeo=1,lookupcache=positive; FUSE attr_timeout=1,entry_timeout=1,negative_timeout=0"
)


def clock(host: str, ahead_s: float, error_s: float) -> Check:
    """Clocks decide nothing, but people read logs by their times."""
    found = f"{ahead_s:+.3f} s against here (± {error_s:.3f} s)"
    if abs(ahead_s) - error_s > CLOCK_S:
        return Check(f"clock of {host}", "warn", found, "run chrony or ntpd: lines of logs are merged by their times")
    return Check(f"clock of {host}", "ok", found)


def file_system(host: str, seen: Mapping[str, Any]) -> Check:
    """Kind, options and room."""
    free = seen["free"] / GIB
    status: Status = "ok" if free >= WANTED_DISK_GIB else "warn" if free >= MIN_DISK_GIB else "fail"
    advice = "" if status == "ok" else f"{WANTED_DISK_GIB:g} GiB are the least for a small run; see `evenkeel plan`"
    return Check(f"folder on {host}", status, f"{seen['kind']} ({seen['options']}), {free:.1f} GiB free", advice)


def not_shared(writer: str, reader: str, deadline_s: float) -> Check:
    """The reader never saw the writer's first file."""
    return Check(
        f"{writer} writes, {reader} reads",
        "fail",
        f"{reader} did not see a new folder of {writer} within {deadline_s:g} s",
        "the folder must be one shared file system, mounted at the same path on every host",
    )


def visibility(writer: str, reader: str, delays: Mapping[str, float | None], deadline_s: float) -> Check:
    """How late another host's change is seen."""
    name = f"{writer} writes, {reader} reads"
    unseen = sorted(what for what, delay in delays.items() if delay is None)
    if unseen:
        return Check(name, "fail", f"not seen within {deadline_s:g} s: {', '.join(unseen)}", ANOTHER)
    seen = {what: delay for what, delay in delays.items() if delay is not None}
    found = "seen after " + ", ".join(f"{delay:.2f} s ({what})" for what, delay in sorted(seen.items()))
    late = max(seen.values()) > SOON_S
    return Check(name, "warn" if late else "ok", found, CACHES if late else "")


def exclusive(rounds: int, won: Sequence[set[int]]) -> Check:
    """Batches, epochs and update numbers are created by a hard link that must have one winner."""
    winners = [sum(number in mine for mine in won) for number in range(rounds)]
    twice, never = sum(count > 1 for count in winners), winners.count(0)
    shares = " : ".join(str(len(mine)) for mine in won)
    if twice or never:
        found = f"of {rounds} files that all hosts created at once, {twice} had several winners, {never} had none"
        return Check("exclusive creation", "fail", found, f"two collectors could commit one batch: {ANOTHER}")
    return Check("exclusive creation", "ok", f"{rounds} races by hard link, one winner each ({shares})")


def replaced(reader: str, times: int, counts: Mapping[str, int]) -> Check:
    """Small files are replaced by a rename while others read them."""
    name = f"replaced file on {reader}"
    found = f"{times} times replaced; read " + ", ".join(f"{count} {how}" for how, count in counts.items())
    if counts["torn"] or counts["missing"]:
        return Check(name, "fail", found, f"readers see half a file or none: {ANOTHER}")
    if counts["stale"]:
        return Check(name, "warn", found, "reads failed while the file was replaced; they are tried again")
    return Check(name, "ok", found)


def appended(expected: int, whole: int) -> Check:
    """Why every process writes log files of its own: nothing rests on this one."""
    if whole == expected:
        return Check("shared appends", "ok", f"{whole} lines of several hosts, all whole")
    found = f"{expected - whole} of {expected} lines of several hosts were torn or lost"
    return Check("shared appends", "ok", f"{found}; a run is not concerned: each process has log files of its own")


def fsync(host: str, seconds: Sequence[float]) -> Check:
    """A batch, a policy and a checkpoint are durable before they get their name."""
    median = statistics.median(seconds)
    found = f"1 MiB durable in {median * 1e3:.1f} ms, at most {max(seconds) * 1e3:.1f} ms"
    if median > FSYNC_S:
        return Check(f"fsync on {host}", "warn", found, "each commit waits for it; a faster file system helps")
    return Check(f"fsync on {host}", "ok", found)


def ports(source: str, target: str, problems: Mapping[str, str]) -> Check:
    """Whether connections reach a host."""
    name = f"{source} connects to {target}"
    failed = [f"port {port}: {problem}" for port, problem in problems.items() if problem]
    if failed:
        advice = f"open these ports between the hosts, or name {target} by an address that they reach: NAME=ADDRESS"
        return Check(name, "fail", "; ".join(failed), advice)
    return Check(name, "ok", f"ports {', '.join(problems)}")
