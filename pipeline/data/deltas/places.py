"""What changed in a run of numbers: at which places, and what stands there now.

    payload   zstd of: gaps, then values; of each first all lowest bytes, then all second ones, and so on
    gaps      for each place, how many numbers lie between it and the place before; of 1 or 2 bytes
    values    the new number at each place, bit for bit; without gaps they stand at every place

A value overwrites what was there. So a payload may be applied any number of times, and it may name places that did not
change: a gap that is longer than its bytes can say is bridged by such places. Numbers are compared as bits, so NaN and
the two zeros are numbers like any other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numcodecs.zstd import Zstd
from numpy.typing import NDArray

RUN_NUMBERS = 1 << 24
"""Longest run that is encoded at once: it bounds the memory, and how much one payload can be blown up to."""
LEVEL = 1
"""Of zstd. Gaps and values are near noise: level 9 takes ten times as long and saves 1 % (tests/bench/delta.py)."""
_UNSIGNED = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_WORTH_ALL = 8
"""From one number in so many on it is also tried whether all numbers take fewer bytes than places and values."""

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.unsignedinteger[Any]]


class Places(NamedTuple):
    """What changed in one run."""

    first: int
    """Where the run begins in its tensor, in numbers."""
    length: int
    """Numbers of the run."""
    places: int
    """Values in the payload."""
    gap_bytes: int
    """Of one gap: 1 or 2; 0 where every place has a value."""


def numbers_of(data: Bytes, width: int) -> Numbers:
    """Bytes [n * width] as unsigned numbers of `width` bytes [n], in the same memory."""
    return data.view(_UNSIGNED[width])


def changed_runs(old: Bytes, new: Bytes, width: int) -> list[tuple[Places, bytes, int]]:
    """What changed from `old` to `new`, each [n * width] bytes: for each run that changed its places, its payload, and
    how many of its numbers differ."""
    before, after = numbers_of(old, width), numbers_of(new, width)
    found = []
    for first in range(0, len(after), RUN_NUMBERS):
        part = slice(first, first + RUN_NUMBERS)
        changed = np.flatnonzero(before[part] != after[part])
        if len(changed):
            found.append((*_encode(first, changed, after[part]), len(changed)))
    return found


def apply(target: Bytes, width: int, run: Places, payload: bytes) -> None:
    """Overwrite in `target`, [n * width] bytes that may be written. Raises ValueError for a payload that is none, with
    nothing written."""
    numbers = numbers_of(target, width)[run.first : run.first + run.length]
    if run.gap_bytes not in (0, 1, 2) or len(numbers) != run.length or not 0 <= run.places <= run.length:
        raise ValueError(f"{run} does not fit a tensor of {len(target) // width} numbers")
    planes = _unpacked(payload, run.places * (run.gap_bytes + width))
    values = _joined(planes[run.places * run.gap_bytes :], width)
    if run.gap_bytes == 0:
        if run.places != run.length:
            raise ValueError(f"{run.places} values for {run.length} places")
        numbers[:] = values
        return
    gaps = _joined(planes[: run.places * run.gap_bytes], run.gap_bytes)
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if run.places and places[-1] >= run.length:
        raise ValueError(f"its last place is {places[-1]}, expected one below {run.length}")
    numbers[places] = values


def _encode(first: int, changed: NDArray[np.int64], after: Numbers) -> tuple[Places, bytes]:
    gaps = np.diff(changed, prepend=-1) - 1
    # A place more costs about as much as the second bytes of four gaps, which are mostly 0.
    gap_bytes = 1 if 4 * int((gaps >> 8).sum()) <= len(gaps) else 2
    gaps = _bridged(gaps, (1 << 8 * gap_bytes) - 1)
    values = after[np.cumsum(gaps + 1) - 1]
    planes = [_planes(gaps.astype(_UNSIGNED[gap_bytes])), _planes(values)]
    best = Places(first, len(after), len(gaps), gap_bytes), _packed(np.concatenate(planes))
    if len(gaps) * _WORTH_ALL > len(after):
        everything = _packed(_planes(after))
        if len(everything) < len(best[1]):
            best = Places(first, len(after), len(after), 0), everything
    return best


def _bridged(gaps: NDArray[np.int64], longest: int) -> NDArray[np.int64]:
    """The gaps with places put in between, so that none exceeds `longest`."""
    bridges = gaps // (longest + 1)
    if not bridges.any():
        return gaps
    ends = np.cumsum(bridges + 1) - 1
    bridged = np.full(ends[-1] + 1, longest, np.int64)
    bridged[ends] = gaps - bridges * (longest + 1)
    return bridged


def _planes(numbers: Numbers) -> Bytes:
    """[n] numbers of w bytes as w runs of n bytes: bytes of one kind compress better together."""
    return np.ascontiguousarray(numbers).view(np.uint8).reshape(len(numbers), -1).T.reshape(-1)


def _joined(planes: Bytes, width: int) -> Numbers:
    """What `_planes` took apart."""
    return np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1).view(_UNSIGNED[width])


def _packed(data: Bytes) -> bytes:
    return bytes(Zstd(level=LEVEL).encode(np.ascontiguousarray(data)))


def _unpacked(payload: bytes, expected: int) -> Bytes:
    """The `expected` bytes that were packed; what the payload claims about its size allocates nothing."""
    data = np.empty(expected, np.uint8)
    try:
        Zstd().decode(payload, out=data)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"its payload cannot be unpacked to {expected} bytes ({error})") from error
    return data
