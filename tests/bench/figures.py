"""What the benchmarks share: medians with their spread, seconds of an action, memory of this process, one JSON line."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    found = list(values)
    return dict(median=statistics.median(found), low=min(found), high=max(found))


def spreads(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Of each figure over the repetitions."""
    return {name: spread(row[name] for row in rows) for name in rows[0]}


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def seconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def resident(field: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS (now) or VmHWM (the most since `forget_peak`)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def forget_peak() -> None:
    """VmHWM starts again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def tell(found: Any) -> None:
    """One line of JSON; numbers with five digits."""

    def short(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.5g}")
        return {key: short(one) for key, one in value.items()} if isinstance(value, dict) else value

    print(json.dumps(short(found)), flush=True)
