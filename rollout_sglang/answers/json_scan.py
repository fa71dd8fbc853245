"""Where the elements of a JSON list lie in its bytes, found without parsing any of them.

An answer of 64 samples of 8,192 tokens has 22 MB. A parser holds Python's lock until it is done with what it was given:
given the whole answer, it stops the event loop for a quarter of a second. So an answer is cut into its samples first,
which are parsed one by one, and each one's size and their number are known before anything is made of them.

The scan looks at blocks of bytes with NumPy, so its memory does not grow with the answer either.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 20
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_CASE_BIT = np.uint8(0x20)
"""Of ASCII: with it set, [ is {, and ] is }."""
_OPENING, _CLOSING = ord("{"), ord("}")
_SPACES = b" \t\r\n"


def element_spans(body: bytes, most: int) -> list[tuple[int, int]]:
    """(start, end) of each element of a JSON list of lists or objects. What lies between them is looked at, what lies
    in them is not. Raises ValueError when `body` is no such list, or has more than `most` elements."""
    starts: list[int] = []
    ends: list[int] = []
    for places, depths, opens in _brackets(body):
        starts += places[opens & (depths == 2)].tolist()
        ends += (places[~opens & (depths == 1)] + 1).tolist()
        if len(starts) > most:
            raise ValueError(f"it has {len(starts)} elements or more, expected {most}")
    if len(starts) != len(ends) or any(end <= start for start, end in zip(starts, ends, strict=True)):
        raise ValueError("it is no JSON list: brackets do not match")
    spans = list(zip(starts, ends, strict=True))
    _check_between(body, spans)
    return spans


def _check_between(body: bytes, spans: list[tuple[int, int]]) -> None:
    """Raises ValueError unless commas stand between the elements, brackets around them, and nothing else."""
    edges = [0, *(place for span in spans for place in span), len(body)]
    gaps = [body[start:end].strip(_SPACES) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    expected = [b"[", *[b","] * (len(spans) - 1), b"]"] if spans else [b"[]"]
    if gaps != expected and not (not spans and b"".join(gaps[0].split()) == b"[]"):
        raise ValueError("it is no JSON list of objects")


def _brackets(body: bytes) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]]:
    """For each block: the places of brackets outside of texts, the depth after each, and whether it opens."""
    quotes_before = depth = backslashes_before = 0
    for first in range(0, len(body), BLOCK_BYTES):
        block = np.frombuffer(body, np.uint8, min(BLOCK_BYTES, len(body) - first), first)
        quotes, backslashes_before = _quotes(block, backslashes_before)
        folded = block | _CASE_BIT
        places = np.flatnonzero((folded == _OPENING) | (folded == _CLOSING))
        if len(quotes) or quotes_before % 2:
            places = places[(np.searchsorted(quotes, places) + quotes_before) % 2 == 0]
        opens = folded[places] == _OPENING
        depths = depth + np.cumsum(np.where(opens, 1, -1))
        yield places + first, depths, opens
        quotes_before += len(quotes)
        depth = int(depths[-1]) if len(depths) else depth


def _quotes(block: NDArray[np.uint8], backslashes_before: int) -> tuple[NDArray[np.int64], int]:
    """The places of quotes that begin or end a text, and how many backslashes in a row end the block. A quote after an
    odd number of backslashes is part of its text."""
    quotes = np.flatnonzero(block == _QUOTE)
    plain = block != _BACKSLASH
    if not backslashes_before and plain.all():
        return quotes, 0
    others = np.flatnonzero(plain)
    # The last byte before each quote that is no backslash; the ones of the block before count as bytes before byte 0.
    last = np.concatenate([[-1 - backslashes_before], others])[np.searchsorted(others, quotes)]
    ending = len(block) - 1 - int(others[-1]) if len(others) else len(block) + backslashes_before
    return quotes[(quotes - 1 - last) % 2 == 0], ending
