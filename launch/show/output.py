"""How a command hands over its result: one JSON object for programs, or a table for people."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer

from precision.text import one_line

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]


_CELL = 100_000
"""Characters of a value that are shown: more than any that is meant for people."""


def emit(result: dict[str, Any]) -> None:
    """The machine-readable last line. JSON has no NaN and no infinity: they are null."""
    print(json.dumps(_finite(result), allow_nan=False), flush=True)


def emit_or_print(result: dict[str, Any], as_json: bool) -> None:
    """One JSON line, or a readable list."""
    if as_json:
        emit(result)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None)
    for key, value in result.items():
        said = json.dumps(value) if isinstance(value, dict | list) else str(value)
        table.add_row(Text(key, style="bold"), Text(one_line(said, _CELL)))  # as text: it may come from a file
    Console().print(table)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_summary(result: dict[str, Any]) -> None:
    """Print a run's headline numbers as a table, and where its report lies."""
    from rich.console import Console

    from launch.show.runs import render

    Console().print(render(result))
    if "report" in result:
        print(f"report: {result['report']}")


def print_plan(result: dict[str, Any]) -> None:
    """A plan as tables."""
    from rich.console import Console

    from launch.plan.view import render

    Console().print(render(result))
