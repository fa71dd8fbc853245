"""What `evenkeel` takes before a command: its version, and what shells ask to complete a word."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from typing import Annotated

import typer

COMPLETION_VARIABLE = "_EVENKEEL_COMPLETE"
"""Set by a shell that asks how a word may go on; typer answers."""


def _print_version(asked: bool) -> None:
    if not asked:
        return
    try:
        print(f"evenkeel {metadata.version('evenkeel')}")
    except metadata.PackageNotFoundError:
        print("evenkeel (from its sources, not installed)")
    raise typer.Exit


def program(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of `evenkeel` itself; the help of the whole is launch.cli's."""


def complete_word(command: Callable[..., object]) -> None:
    """Answer a shell that asks how a word may go on, and exit; nothing where none asks."""
    if COMPLETION_VARIABLE in os.environ:
        command(prog_name="evenkeel")
