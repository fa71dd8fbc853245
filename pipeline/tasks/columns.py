"""A row of somebody's data as a problem."""

from __future__ import annotations

import json
import math
from typing import Any

from pipeline.config.task_sections import Columns
from pipeline.errors import RecipeError
from pipeline.tasks.base import Problem
from pipeline.tasks.rows.row import Row
from precision.text.short import listed, one_line, quoted

_KIND = {"dict": "an object", "list": "a list", "bool": "true or false", "float": "a number", "int": "a number"}


def problem_of(row: Row, columns: Columns) -> Problem:
    """Raises RecipeError that names the row, and the keys that it has."""
    text = _found(row, columns.prompt)
    if not isinstance(text, str):
        raise _unfit(row, "prompt", columns.prompt, text, "text")
    if not text:
        raise RecipeError(f"{row.where}: {columns.prompt} is empty, expected text; remove the row")
    return Problem(text=text, answer=_answer(row, columns.answer))


def _answer(row: Row, name: str | None) -> str:
    """Numbers as JSON writes them. Empty where the data has no answers."""
    if name is None:
        return ""
    value = _found(row, name)
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _unfit(row, "answer", name, value, "text or a number")
    return json.dumps(value)


def _found(row: Row, name: str) -> Any:
    """The value of a column; `a.b` is b of the object a, unless a column has that name. None where there is none."""
    if name in row.values:
        return row.values[name]
    value: Any = row.values
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _unfit(row: Row, what: str, name: str, value: Any, expected: str) -> RecipeError:
    if value is not None:
        got = f"{quoted(value)}, {_KIND.get(type(value).__name__, type(value).__name__)}"
        return RecipeError(f"{row.where}: {one_line(name, 60)} is {got}, expected {expected}; correct the row")
    keys = listed([one_line(key, 40) for key in row.values], most=12, between=", ") or "none"
    no_answers = ", or to null where there are no answers" if what == "answer" else ""
    return RecipeError(
        f"{row.where}: {one_line(name, 60)} is nothing, expected {expected}; keys found: {keys}; set "
        f"task.columns.{what} to one of them{no_answers}"
    )
