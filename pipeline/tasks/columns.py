"""A row of somebody's data as a problem."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from pipeline.config.task_sections import DataTask
from pipeline.errors import RecipeError
from pipeline.tasks.base import Problem
from pipeline.tasks.rows.row import Row
from precision.text import listed, one_line, quoted

_MISSING = object()
_KIND = {"dict": "an object", "list": "a list", "bool": "true or false", "float": "a number", "int": "a number"}


Keeps = Callable[[str | None, str | None, Mapping[str, Any]], bool]
"""Whether a row is one of the task's, by its prompt, its answer (None where it is null) and its metadata."""


def problem_of(row: Row, section: DataTask, keeps: Keeps | None = None) -> Problem | None:
    """None where `keeps` says no. Raises RecipeError that names the row, and the keys that it has."""
    columns = section.columns
    name = columns.prompt or ("messages" if "messages" in row.values and "prompt" not in row.values else "prompt")
    text, messages = _prompt(row, name, section)
    answer = _answer(row, section)
    used = {name, columns.answer}
    metadata = {key: plain(value) for key, value in row.values.items() if key not in used}
    if keeps is not None and not keeps(text, answer, metadata):
        return None
    if text is None or answer is None:
        what, column = ("prompt", name) if text is None else ("answer", columns.answer)
        raise RecipeError(
            f"{row.where} has no {what}: {one_line(column, 60)} is null, expected a value; remove the row, or leave it "
            "out by task.filter"
        )
    if not text:
        raise RecipeError(f"{row.where}: {name} is empty, expected text; remove the row")
    return Problem(text=text, answer=answer, messages=messages, metadata=metadata, where=row.where)


def _prompt(row: Row, name: str, section: DataTask) -> tuple[str | None, tuple[dict[str, Any], ...]]:
    """Its text, None where it is null, and the conversation, where it is one."""
    found, system = _found(row, name), _system_prompt(row, section)
    if isinstance(found, list):
        messages = _conversation(row, name, found, section, system)
        return "\n\n".join(str(one["content"]) for one in messages if one["role"] != "system"), messages
    if not isinstance(found, str | None):
        raise _unfit(row, section, "prompt", name, found, "text or messages")
    return found, (*system, dict(role="user", content=found)) if system else ()


def _system_prompt(row: Row, section: DataTask) -> tuple[dict[str, Any], ...]:
    """The row's own, else the task's, else none, as messages. A row without the column is refused, since it may be
    misspelt; null and empty text are none of the row's own."""
    name, text = section.columns.system_prompt, None
    if name is not None:
        text = _found(row, name)
        if not isinstance(text, str | None):
            raise _unfit(row, section, "system_prompt", name, text, "text, or null for the task's system_prompt")
    text = text or section.system_prompt
    return () if text is None else (dict(role="system", content=text),)


def _conversation(
    row: Row, name: str, found: list[Any], section: DataTask, system: tuple[dict[str, Any], ...]
) -> tuple[dict[str, Any], ...]:
    """The messages of a row, after the system prompt where they have none. Raises RecipeError for what is none, and for
    a conversation in which the model has no turn."""
    for one in found:
        if not isinstance(one, dict) or not all(isinstance(one.get(key), str) for key in ("role", "content")):
            raise _unfit(row, section, "prompt", name, found, 'text or messages {"role": …, "content": text}')
    messages = tuple({key: value for key, value in one.items() if value is not None} for one in found)
    if not section.chat_template:
        raise RecipeError(
            f"{row.where}: {name} holds messages, which a chat template writes; set task.chat_template=true"
        )
    if not messages or messages[-1]["role"] in ("assistant", "system"):
        last = f"ends with the {messages[-1]['role']}'s message" if messages else "holds no messages"
        raise RecipeError(f"{row.where}: {name} {last}, so that there is nothing to answer; end it with the user's")
    return messages if messages[0]["role"] == "system" else (*system, *messages)


def plain(value: Any) -> Any:
    """A value as JSON can hold it: dates and other things that Parquet knows as text, numbers that are none as null."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return _number(value)
    return value if value is None or isinstance(value, str | int) else str(value)


def _answer(row: Row, section: DataTask) -> str | None:
    """Numbers as JSON writes them, but without an exponent: verifiers read 5e-05 as 5·e - 5. Empty where the data
    has no answers, None where the row's is null."""
    if (name := section.columns.answer) is None:
        return ""
    value = _found(row, name)
    if isinstance(value, str | None):
        return value
    if isinstance(value, Decimal) and value.is_finite():
        return _number(value)
    if isinstance(value, dict | list):
        kind, kept = _KIND[type(value).__name__], "".join(f"[{quoted(part)}]" for part in _path(row, name))
        raise RecipeError(
            f"{row.where}: {one_line(name, 60)} is {quoted(value)}, {kind}, expected text or a number; set "
            f"task.columns.answer to null and read metadata{kept} in a reward function (docs/rewards.md)"
            + (
                f", or name a part of it, as in {one_line(name, 60)}.{one_line(min(value), 60)}"
                if _named(value)
                else ""
            )
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _unfit(row, section, "answer", name, value, "text or a number")
    text = json.dumps(value)
    return format(Decimal(text), "f") if "e" in text else text


def _number(value: Decimal) -> str:
    """Exactly, without zeros at its end: 12.50 as 12.5, and 4E+1 as 40."""
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _named(value: dict[Any, Any] | list[Any]) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(key, str) for key in value)


def _path(row: Row, name: str) -> list[str]:
    """By which keys the metadata hold a column."""
    return [name] if name in row.values else name.split(".")


def _found(row: Row, name: str) -> Any:
    """The value of a column; `a.b` is b of the object a, unless a column has that name. Without it: _MISSING."""
    if name in row.values:
        return row.values[name]
    value: Any = row.values
    for part in name.split("."):
        if value is not None:  # nothing is inside of null but null
            value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def _unfit(row: Row, section: DataTask, what: str, name: str, value: Any, expected: str) -> RecipeError:
    if value is not _MISSING:
        got = f"{quoted(value)}, {_KIND.get(type(value).__name__, type(value).__name__)}"
        return RecipeError(f"{row.where}: {one_line(name, 60)} is {got}, expected {expected}; correct the row")
    keys = listed([one_line(key, 40) for key in row.values], most=12, between=", ") or "none"
    if row.unread:
        others = [f"{one_line(key, 40)} ({one_line(kind, 40)})" for key, kind in row.unread.items()]
        keys += f"; not read: {listed(others, most=12, between=', ')}"
    no_answers = ", or to null where there are no answers" if what == "answer" else ""
    alike = "" if section.held_out_path is None else "; path and held_out_path need the same columns"
    return RecipeError(
        f"{row.where}: {one_line(name, 60)} is nothing, expected {expected}; keys found: {keys}; set "
        f"task.columns.{what} to one of them{no_answers}{alike}"
    )
