"""JSON from outside as plain data: one kind of error, in one line, for everything that is wrong with it.

`json.loads` raises JSONDecodeError for bad syntax, but UnicodeDecodeError for bytes, a bare ValueError for a number of
4,301 digits, and RecursionError for brackets; and it reads halves of characters that can never be written again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from precision.text.short import one_line, quoted

MOST_DEPTH = 100
_HALF = re.compile(r"[\ud800-\udfff]")


class JsonError(ValueError):
    """The text is not JSON that can be used; the message says where, in one line."""


def parse_json(text: bytes | str) -> Any:
    """The value. Raises JsonError; also for an object that has a key twice."""
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise JsonError(f"not UTF-8 at byte {error.start}; convert the file") from None
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except JsonError:
        raise
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise JsonError(f"not JSON ({one_line(error.msg, 100)} at {where})") from None
    except RecursionError:
        raise JsonError(f"nested more than {MOST_DEPTH} levels deep") from None
    except ValueError:
        raise JsonError("not JSON that can be read (a number has more than 4300 digits)") from None
    if text.count("[") + text.count("{") > MOST_DEPTH or "\\u" in text or _HALF.search(text):
        _check(value)
    return value


def parse_object(text: bytes | str) -> dict[str, Any]:
    """The value, which must be an object. Raises JsonError."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise JsonError(f"it holds {quoted(value)}, expected an object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise JsonError(f"key {quoted(twice)} is given twice")
    return found


def _check(value: Any) -> None:
    """Depth, and text that can be written again."""
    waiting = [(value, 1)]
    while waiting:
        one, depth = waiting.pop()
        if depth > MOST_DEPTH:
            raise JsonError(f"nested more than {MOST_DEPTH} levels deep")
        if isinstance(one, str) and _HALF.search(one):
            raise JsonError(f"text {quoted(one)} holds half of a surrogate pair, which is no character")
        if isinstance(one, dict):
            waiting += [(part, depth + 1) for pair in one.items() for part in pair]
        elif isinstance(one, list):
            waiting += [(part, depth + 1) for part in one]
