"""What is done to good input, drawn from a seed: bytes that change, values that are something else,
keys that move."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

LONGEST = 600
"""Characters of a refusal."""

NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**29, 0.5, 1e308, float("inf"), float("nan"), "", " ",
    "0b_", "0x", "1:30", "2001-99-99", "1e400", "no", "null", "a" * 5000, "ü" * 300, "../../..", "/dev/zero",
    "/proc/1",
    "a\nb", "\x1b[2J", "\u202egnp", "\ud800", "\0", "${HOME}", "%s%n", "{}", "<script>", [], {}, [[]], [None],
    {"": 1},
    [[[[[[[[]]]]]]]], {"a": {"a": {"a": {"a": 1}}}}, list(range(300)), {str(i): i for i in range(300)}, "🦆",
    "4" * 4301,
)  # fmt: skip
"""Values that no schema wants, or that some parser trips over."""

SPANS = (
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xc0\x80", b"\r", b"\n", b"\n\n", b"\t", b"\x1b[31m",
    b"9" * 4301, b"[" * 3000, b"{" * 3000, b'{"a":' * 3000, b"\\ud800", b"\\u0000", b'"', b"'", b"\\", b"#", b": ",
    b"- ", b"&a ", b"*a", b"!!python/object:os.system ", b"%YAML 9.9\n", b"---\n", b"...\n", b"<<: ", b"? ", b"| ",
    b"NaN", b"Infinity", b"-1e999", b"null", b"a" * 5000, "\u2028".encode(), "ß".encode("latin-1"),
)  # fmt: skip
"""Bytes that mean something to YAML, JSON, UTF-8 or a terminal."""


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """One to four changes."""
    for _ in range(rng.randint(1, 4)):
        data = rng.choice(_BYTE_CHANGES)(rng, data)
    return data


def _flip(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randint(0, len(data))]


def _delete(rng: random.Random, data: bytes) -> bytes:
    start, stop = _span(rng, data)
    return data[:start] + data[stop:]


def _repeat(rng: random.Random, data: bytes) -> bytes:
    start, stop = _span(rng, data)
    return data[:stop] + data[start:stop] * rng.choice((1, 1, 2, 50)) + data[stop:]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(SPANS) + data[at:]


def _noise(rng: random.Random, data: bytes) -> bytes:
    start, stop = _span(rng, data)
    return data[:start] + rng.randbytes(stop - start) + data[stop:]


def _move(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    rng.shuffle(lines)
    return b"\n".join(lines)


def _span(rng: random.Random, data: bytes) -> tuple[int, int]:
    start = rng.randint(0, len(data))
    return start, min(len(data), start + rng.choice((1, 1, 2, 4, 8, 64, 512)))


_BYTE_CHANGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _flip, _flip, _cut, _delete, _repeat, _insert, _insert, _noise, _move,
)  # fmt: skip


def mutated_data(rng: random.Random, data: Any) -> Any:
    """One to three changes at random places of dicts and lists."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(data))
        if not places:
            return rng.choice(NASTY)
        _change(rng, *rng.choice(places))
    return data


def _places(data: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value at any depth."""
    found: list[tuple[Any, Any]] = []
    waiting = [data]
    while waiting and len(found) < 2000:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else list(range(len(one))) if isinstance(one, list) else []
        found += [(one, key) for key in keys]
        waiting += [one[key] for key in keys]
    return found


def _change(rng: random.Random, container: Any, key: Any) -> None:
    how = rng.choice(("replace", "replace", "replace", "delete", "rename", "add", "number", "wrap", "swap"))
    value = container[key]
    if how == "delete":
        del container[key]
    elif how == "rename" and isinstance(container, dict):
        container[rng.choice([*_KEYS, f"{key}x", str(key)[:-1]])] = container.pop(key)
    elif how == "add":
        _add(rng, container)
    elif how == "number" and isinstance(value, int | float) and not isinstance(value, bool):
        container[key] = rng.choice((-value, value + 1, value * 10**6, value * 10**25, str(value), value - 1, 0))
    elif how == "wrap":
        container[key] = rng.choice(([value], {"value": value}, [value] * 3, str(value)))
    elif how == "swap" and len(container) > 1:
        other = rng.choice(list(container) if isinstance(container, dict) else range(len(container)))
        container[key], container[other] = container[other], value
    else:
        container[key] = copy.deepcopy(rng.choice(NASTY))


_KEYS = ("", " ", "a" * 3000, "a\nb", "\x1b[1m", "ü", "__class__", "0", "name", "class", "extends", "\ud800", "🦆")


def _add(rng: random.Random, container: Any) -> None:
    value = copy.deepcopy(rng.choice(NASTY))
    if isinstance(container, dict):
        container[rng.choice(_KEYS)] = value
    else:
        container.insert(rng.randint(0, len(container)), value)


def judged(call: Callable[[], object], *allowed: type[Exception], names: Sequence[object] = ()) -> str:
    """ "ok" where `call` returns, or raises one of `allowed` with a good line. Anything else passes through."""
    try:
        call()
    except allowed as error:
        return judged_line(str(error), names)
    return "ok"


def judged_line(line: str, names: Sequence[object] = ()) -> str:
    """ "ok" for a refusal as it should be: short, one line, printable, and it names one of `names`."""
    if len(line) > LONGEST:
        return f"a refusal of {len(line)} characters: {line[:200]!a}"
    if (
        len(line.splitlines()) != 1
        or "Traceback" in line
        or any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in line)
    ):
        return f"not one printable line: {line[:200]!a}"
    if names and not any(str(name) in line for name in names):
        return f"names none of {', '.join(map(str, names))}: {line[:200]!a}"
    return "ok"
