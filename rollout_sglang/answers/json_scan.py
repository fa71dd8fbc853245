"""The elements of a JSON list, cut out of its bytes as they come, without parsing any of them.

An answer of 64 samples of 8,192 tokens has 22 MB. A parser holds Python's lock until it is done with what it was given:
given the whole answer, it stops the event loop for a quarter of a second. So an answer is cut into its samples, which
are parsed one by one, while the rest of it is still on its way: nobody ever holds all of its bytes.

The scan looks at the bytes with NumPy, and at each of them once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_CASE_BIT = np.uint8(0x20)
"""Of ASCII: with it set, [ is {, and ] is }."""
_OPENING, _CLOSING = ord("{"), ord("}")


class ElementCutter:
    """Of a JSON list of lists or objects. What lies between its elements is looked at, what lies in them is not."""

    def __init__(self, *, most: int, element_bytes: int) -> None:
        """Up to `most` elements of up to `element_bytes` each are expected."""
        self.count = 0
        """Elements that have begun."""
        self._most = most
        self._element_bytes = element_bytes
        self._depth = self._quotes_before = self._backslashes_before = 0
        self._open: bytearray | None = None
        """What there is of an element that has not ended; None between two."""
        self._between = b""
        """What was seen since the last element, without blanks."""

    def add(self, part: bytes) -> Iterator[bytes]:
        """The elements that end in `part`, which follows the parts before it; all are to be taken before the next one
        is added. Raises ValueError when this can be no such list, or is a larger one than was expected."""
        done = 0
        for edge in self._edges(part):
            if self._open is None:
                self._pass(part[done:edge])
                self._begin()
            else:
                self._keep(part[done:edge])
                yield bytes(self._open)
                self._open = None
            done = edge
        if self._open is None:
            self._pass(part[done:])
        else:
            self._keep(part[done:])

    def end(self) -> None:
        """There are no more parts. Raises ValueError unless the list has ended with them."""
        if self._open is not None or self._between != (b"]" if self.count else b"[]"):
            raise ValueError("it is no JSON list of objects, or not a whole one")

    def _begin(self) -> None:
        if self._between != (b"," if self.count else b"["):
            raise ValueError("it is no JSON list of objects")
        if self.count == self._most:
            raise ValueError(f"it has more than {self._most} elements")
        self.count += 1
        self._open, self._between = bytearray(), b""

    def _pass(self, gap: bytes) -> None:
        """Between two elements."""
        self._between += b"".join(gap.split())
        if len(self._between) > 2:
            raise ValueError("it is no JSON list of objects")

    def _keep(self, inner: bytes) -> None:
        assert self._open is not None
        if len(self._open) + len(inner) > self._element_bytes:
            raise ValueError(f"its element {self.count - 1} has more than {self._element_bytes} bytes")
        self._open += inner

    def _edges(self, part: bytes) -> list[int]:
        """Where elements begin and end, by turns: the places of brackets that lead into depth 2, and behind those that
        lead out of it."""
        block = np.frombuffer(part, np.uint8)
        quotes, self._backslashes_before = _quotes(block, self._backslashes_before)
        folded = block | _CASE_BIT
        places = np.flatnonzero((folded == _OPENING) | (folded == _CLOSING))
        if len(quotes) or self._quotes_before % 2:
            places = places[(np.searchsorted(quotes, places) + self._quotes_before) % 2 == 0]
        opens = folded[places] == _OPENING
        depths = self._depth + np.cumsum(np.where(opens, 1, -1))
        self._quotes_before += len(quotes)
        self._depth = int(depths[-1]) if len(depths) else self._depth
        is_edge = np.where(opens, depths == 2, depths == 1)
        return list(map(int, (places + ~opens)[is_edge]))


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
