"""The page of all commands, made from the command line's own parser: every `--help` on one page."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from launch.cli import app

_HEAD = """# Commands

Every command says the same with `--help`. Those that read a run print a table, or one JSON object with `--json`. They
end with status 0, or with 1 and one line that says why; 2 is a wrong command line, 70 a fault of Even Keel's own, 130
Ctrl-C. This page is made from the code by `make docs`.
"""


def commands_page() -> str:
    """The whole page, as Markdown."""
    parser = typer.main.get_command(app)
    parts = [_HEAD, *_parameters("evenkeel", parser)]
    for path, command in leaves(parser):
        parts.append(f"## {path} {{ #{path.removeprefix('evenkeel ').replace(' ', '-')} }}\n")
        parts.append(f"{_as_markdown(command.help or '')}\n")
        parts += _parameters(path, command)
    return "\n".join(parts)


def leaves(command: Any, path: str = "evenkeel") -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the words that call it."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, inner in command.commands.items():
        yield from leaves(inner, f"{path} {name}")


def _parameters(path: str, command: Any) -> Iterator[str]:
    """How a command is called, and its arguments and options in words: those of its `--help`."""
    with command.make_context(path, [], resilient_parsing=True) as context:
        yield f"```text\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```\n"
        records = [parameter.get_help_record(context) for parameter in command.params]
    rows = [f"| `{_cell(names)}` | {_cell(_as_markdown(help_text))} |" for names, help_text in filter(None, records)]
    if rows:
        yield "\n".join(["| | |", "|---|---|", *rows]) + "\n"


def _as_markdown(text: str) -> str:
    return inspect.cleandoc(text).replace("<", "&lt;")


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())
