"""Read text from outside, YAML 1.2 and JSON, and quote it in messages of one line.

A value from a file may be of any size, and may hold line ends, escape sequences or halves of characters. A message that
repeats it as it is becomes megabytes, or several lines, or cannot be printed.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

MESSAGE_CHARACTERS = 2000
"""Longest message of an error. Messages about values are far shorter; the end of a log may need more."""
MOST_BYTES = 1 << 20
"""Largest YAML document."""
MOST_VALUES = 100_000
"""Most values of a YAML document, an alias counted as often as it repeats: ten lines of aliases can hold millions."""
LONGEST_WORD = 80
"""Longest word, in characters, that is compared: a longer one is no misspelling, and comparing is quadratic."""
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_IN_NO_NAME = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")
_PLAIN = {
    "null": r"|~|null|Null|NULL",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(?:0|[1-9][0-9_]*)",
    "float": r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
"""Plain scalars of YAML 1.2 that are not text. YAML 1.1 reads `no` as False, `1:30` as 90 and `012` as 10."""


class YamlError(ValueError):
    """The text is not usable YAML; the message says where, in one line."""


class JsonError(ValueError):
    """The text is not usable JSON; the message says where, in one line."""


def one_line(text: object, limit: int = MESSAGE_CHARACTERS) -> str:
    """Return the text with single spaces, control characters as escapes, and at most `limit` characters."""
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
    """Return `repr(value)`; of a long value its beginning and its size. Never fails."""
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
    """Join the first parts, and state how many more there are."""
    more = f"{between}and {len(parts) - most} more" if len(parts) > most else ""
    return between.join(parts[:most]) + more


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean grpo?` to end a message with; empty where no known word is spelled nearly so."""
    found = get_close_matches(word, list(known), n=1) if len(word) <= LONGEST_WORD else []
    return f"; did you mean {found[0]}?" if found else ""


def without(text: str, secret: str, stars: str = "***") -> str:
    """Replace `secret` by `stars`: as it is, as `repr` writes it, percent-encoded whole or in part."""

    def either(character: str) -> str:
        if character == " ":
            return "(?: |%20|[+])"
        if character.isascii() and character.isalnum():
            return character
        encoded = "".join(f"%{byte:02x}" for byte in character.encode(errors="surrogateescape"))
        return f"(?:{re.escape(character)}|(?i:{encoded}))"

    for written in (secret, repr(secret)[1:-1]):
        text = re.sub("".join(map(either, written)), lambda _: stars, text)
    return text


class _Loader(yaml.SafeLoader):
    """A loader that reads plain scalars as YAML 1.2 does, and keys as text, each once. It refuses while it parses:
    PyYAML takes 10 s to parse 1 MiB."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as PyYAML declares it

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_values = 0
        self._keys: dict[int, set[str]] = {}
        """id of a mapping under way → its keys so far."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        node = super().compose_node(parent, index)
        if index is not None or not isinstance(parent, yaml.MappingNode):
            self._num_values += 1
            if self._num_values > MOST_VALUES:
                raise YamlError(f"it holds over {MOST_VALUES:,} values, the most that are read; shorten it")
        elif not isinstance(node, yaml.ScalarNode):
            _refuse(node, "a key is a list or a mapping; expected a word")
        elif node.value in (keys := self._keys.setdefault(id(parent), set())):
            _refuse(node, f"key {quoted(node.value)} is given twice; remove one")
        else:
            keys.add(node.value)
        return node

    def construct_scalar(self, node: Any) -> Any:
        if isinstance(node.value, str) and (found := _IN_NO_NAME.search(node.value)) is not None:
            _refuse(node, f"the text holds the character {found[0]!a}, which no name or path can have; remove it")
        return super().construct_scalar(node)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: ARG002 - always deep
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text that `_Loader` would read as a number."""


for kind, pattern in _PLAIN.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"^(?:{pattern})$"), None)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_PLAIN['float']})$"), list("-+0123456789."))


def _refuse(node: Any, problem: str) -> None:
    raise YamlError(f"line {node.start_mark.line + 1}, column {node.start_mark.column + 1}: {problem}")


def _count_values(data: object, counted: dict[int, float]) -> float:
    """Count values, a repeated value once for each place; infinity where a value holds itself."""
    if not isinstance(data, dict | list):
        return 1
    if id(data) not in counted:
        counted[id(data)] = float("inf")
        parts = data.values() if isinstance(data, dict) else data
        counted[id(data)] = 1 + sum(_count_values(part, counted) for part in parts)
    return counted[id(data)]


def parse_yaml(text: bytes | str) -> Any:
    """Return the data of one YAML document. Raises YamlError."""
    if len(text) > MOST_BYTES:
        raise YamlError(f"it is larger than {MOST_BYTES >> 20} MiB, the most that is read")
    try:
        data = yaml.load(text.decode("utf-8-sig") if isinstance(text, bytes) else text, _Loader)
        if _count_values(data, {}) > MOST_VALUES:
            raise YamlError(
                f"with its aliases it holds over {MOST_VALUES:,} values, the most that are read; use fewer *aliases"
            )
        return data
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise YamlError(f"line {line}: not UTF-8 (byte 0x{error.object[error.start]:02x}); save it as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        what = error.problem or error.context
        remedy = "; indent with spaces" if "'\\t'" in str(what) else ""
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise YamlError(f"{place}not YAML: {one_line(what, 200)}{remedy}") from None
    except YamlError:
        raise
    except RecursionError:
        raise YamlError("it is nested too deep; flatten it") from None
    except (AttributeError, TypeError):  # of PyYAML, for a value that is nothing like its tag
        raise YamlError("not YAML: a tag such as !!timestamp does not fit its value; remove the tag") from None
    except (ValueError, ArithmeticError, LookupError, yaml.YAMLError) as error:
        raise YamlError(f"not YAML: {one_line(error, 200)}") from None


def read_yaml(path: Path) -> Any:
    """Return the data of a YAML file; of one that does not end, MOST_BYTES are read. Raises YamlError, OSError."""
    with path.open("rb") as file:
        return parse_yaml(file.read(MOST_BYTES + 1))


def dump_yaml(data: Any) -> str:
    """Return data as YAML from which `parse_yaml` returns the same data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_json(text: bytes | str) -> Any:
    """Return the value of JSON text. Raises JsonError, also for text that could never be written again."""
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except RecursionError:
        raise JsonError("not JSON that can be read: it is nested too deep") from None
    except UnicodeDecodeError as error:
        raise JsonError(f"not UTF-8 at byte {error.start}; convert the file") from None
    except ValueError as error:
        raise JsonError(f"not JSON ({one_line(error, 200)})") from None
    return value


def parse_object(text: bytes | str) -> dict[str, Any]:
    """Return the object that JSON text holds. Raises JsonError."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise JsonError(f"it holds {quoted(value)}, expected an object")
    return value
