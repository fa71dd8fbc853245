"""Lines of a log as columns of numbers, for whoever computes with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.analysis.run_log import number

Columns = dict[str, NDArray[Any]]


def columns(lines: Sequence[Mapping[str, Any]], key: str) -> Columns:
    """Name → [lines] float64, NaN where a line has no such number; `key`, which each line has, is the first column,
    int64. A part of a mapping is behind a slash: `seconds/update`."""
    rows = [dict(numbers(line)) for line in lines]
    names = dict.fromkeys(name for row in rows for name in row if name != key)
    first = {key: np.array([line[key] for line in lines], np.int64)}
    return first | {name: np.array([row.get(name, np.nan) for row in rows], np.float64) for name in names}


def numbers(line: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a line, at any depth, by name."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{above}{name}/")
        elif (found := number(line, name)) is not None:
            yield f"{above}{name}", found
