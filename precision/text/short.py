"""What a message may quote: a bounded part of a value, on one line, without what a terminal would obey.

A value from a file may be of any size, and may hold line ends, escape sequences or halves of characters. A message that
repeats it as it is becomes megabytes, or several lines, or cannot be printed.
"""

from __future__ import annotations

import re
import reprlib

MESSAGE_CHARACTERS = 2000
"""Longest message of an error. Those about values are far below; the end of a log may be longer."""
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: object, limit: int = MESSAGE_CHARACTERS) -> str:
    """The text with single spaces, control characters as escapes, and at most `limit` characters."""
    raw = str(text)
    words = " ".join(raw[: 2 * limit].split())
    safe = _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], words)
    if len(safe) <= limit and len(raw) <= 2 * limit:
        return safe
    end = f"… ({len(raw)} characters in all)"
    if limit < 2 * len(end):  # the text says more than its size
        end = "…"
    return f"{safe[: limit - len(end)].rstrip()}{end}"


def quoted(value: object, limit: int = 60) -> str:
    """`repr(value)`, of a long value its beginning and its size. Never fails, whatever the value is."""
    if isinstance(value, str):
        if len(value) <= limit:
            return ascii(value) if _UNPRINTABLE.search(value) else repr(value)
        return f"{quoted(value[: limit - 20])}… ({len(value)} characters)"
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = limit
    short.maxlevel = 3
    try:
        return one_line(short.repr(value), 2 * limit)
    except Exception:  # noqa: BLE001 - a value that cannot say what it is; its kind must do
        return f"a {type(value).__name__}"


def listed(parts: list[str], most: int = 5, between: str = "; ") -> str:
    """The first parts, and how many more there are."""
    more = f"{between}and {len(parts) - most} more" if len(parts) > most else ""
    return between.join(parts[:most]) + more
