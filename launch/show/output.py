"""How a command hands over its result: one JSON object for programs, or a table for people."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]


def emit(result: dict[str, Any]) -> None:
    """The machine-readable last line."""
    print(json.dumps(result), flush=True)


def emit_or_print(result: dict[str, Any], as_json: bool) -> None:
    """One JSON line, or a readable list."""
    if as_json:
        emit(result)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for key, value in result.items():
        table.add_row(f"[bold]{key}[/bold]", json.dumps(value) if isinstance(value, dict | list) else str(value))
    Console().print(table)


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
