"""YAML from outside as plain data, within bounds: dicts with text as keys, lists, text, numbers, True, False and None.

Only what recipes need of YAML is read. Bytes, nesting, values and digits are bounded, aliases are written out and count
as what they stand for, tags and merge keys are refused, and so is a key that is given twice. Of the plain scalars only
decimal numbers, true, false and null mean more than their text. YAML 1.1 reads `no` as False, `1:30` as 90, `012` as 10
and `2001-01-01` as a date. Whatever PyYAML's `safe_dump` writes of such data is read back as it was, or refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from precision.text.short import one_line, quoted

MOST_BYTES = 1 << 20
MOST_DEPTH = 32
MOST_VALUES = 20_000
"""Values of a document, those behind aliases counted as often as they are named."""
MOST_DIGITS = 30
_TOO_MANY = f"more than {MOST_VALUES} values, with what aliases stand for; write less, or fewer aliases"
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")
"""Also the line breaks of Unicode: PyYAML writes them as they are, and reads a space."""


class YamlError(ValueError):
    """The text is not such a document; the message names line and column, in one line."""


def read_yaml(path: Path) -> Any:
    """The data of a file. Raises OSError, and YamlError."""
    if not path.is_file() and not path.is_dir() and path.exists() and path.parts[:2] != ("/", "dev"):
        raise YamlError("it is a pipe, a socket or a device; expected a file")
    with path.open("rb") as file:
        return parse_yaml(file.read(MOST_BYTES + 1))


def parse_yaml(text: bytes | str) -> Any:
    """The data of one document. Raises YamlError."""
    if len(text) > MOST_BYTES:
        raise YamlError(f"it is larger than {MOST_BYTES >> 20} MiB, the most that is read")
    decoded = _decoded(text) if isinstance(text, bytes) else text
    if (found := _FORBIDDEN.search(decoded)) is not None:
        _refuse_at(decoded, found.start(), f"character {found[0]!a} is not allowed in YAML; remove it")
    try:
        node = _Loader(decoded).get_single_node()
    except yaml.reader.ReaderError as error:
        _refuse_at(decoded, error.position, f"character {chr(error.character)!a} is not allowed in YAML; remove it")
    except yaml.MarkedYAMLError as error:
        where = error.problem_mark or error.context_mark
        what = error.problem or error.context
        remedy = "; indent with spaces" if "'\\t'" in str(what) else ""
        raise YamlError(f"{_place(where)}not YAML: {one_line(what, 200)}{remedy}") from None
    except YamlError:
        raise
    except (ValueError, ArithmeticError, LookupError) as error:  # PyYAML on \U and %YAML with wild numbers
        raise YamlError(f"not YAML: {one_line(error, 200)}") from None
    return None if node is None else _Data().of(node, 0)


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = text[: error.start].decode("utf-8-sig", "replace")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise YamlError(
            f"line {line}, column {column}: not UTF-8 (byte 0x{text[error.start]:02x}); save the file as UTF-8"
        ) from None


def _refuse_at(text: str, position: int, what: str) -> NoReturn:
    line, column = text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
    raise YamlError(f"line {line}, column {column}: {what}") from None


def _place(mark: Any) -> str:
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "


def _refuse(node: Any, what: str) -> NoReturn:
    raise YamlError(f"{_place(node.start_mark)}{what}")


class _Loader(yaml.SafeLoader):
    """Composes nodes without a meaning, and stops at what is nested too deep before it is read to its end."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as PyYAML declares it

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._composed = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None) is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            _refuse(event, f"tag {quoted(tag)} is not read; write the value without it")
        if self._depth >= MOST_DEPTH:
            _refuse(event, f"nested more than {MOST_DEPTH} levels deep; flatten it")
        self._composed += 1
        if self._composed > MOST_VALUES:
            _refuse(event, _TOO_MANY)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class _Data:
    """Makes data of nodes, and counts what it makes: an alias bomb is small as text and as nodes."""

    def __init__(self) -> None:
        self._values = 0

    def of(self, node: Node, depth: int) -> Any:
        self._values += 1
        if self._values > MOST_VALUES:
            _refuse(node, _TOO_MANY)
        if depth >= MOST_DEPTH:
            _refuse(node, f"nested more than {MOST_DEPTH} levels deep, or an alias of what it stands in; flatten it")
        match node:
            case ScalarNode():
                return _scalar(node)
            case SequenceNode():
                return [self.of(part, depth + 1) for part in node.value]
            case _:
                return {key: self.of(value, depth + 1) for key, value in self._pairs(node)}

    def _pairs(self, node: Node) -> Iterator[tuple[str, Node]]:
        assert isinstance(node, MappingNode)
        given: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                _refuse(key, "a key is a list or a mapping; expected a word")
            if key.style is None and key.value == "<<":
                _refuse(key, "merge keys (<<) are not read; write the keys out, or use `extends`")
            name = _text(key)
            if name in given:
                _refuse(key, f"key {quoted(name)} is given twice; remove one")
            given.add(name)
            yield name, value


def _text(node: ScalarNode) -> str:
    text: str = node.value
    if (found := _FORBIDDEN.search(text)) is not None:
        _refuse(node, f"the text holds the character {found[0]!a}, which no name or path can have; remove it")
    return text


def _scalar(node: ScalarNode) -> Any:
    text = _text(node)
    if node.style is not None:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        number = text.replace("_", "")
        if (digits := len(number.lstrip("+-"))) > MOST_DIGITS:
            _refuse(node, f"a number of {digits} digits, at most {MOST_DIGITS} are read; quote it if it is text")
        return int(number)
    return float(text.replace("_", "")) if _FLOAT.fullmatch(text) else text
