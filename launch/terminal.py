"""Share what every command has: arguments, results on stdout, progress on stderr.

A result is one JSON object for programs, or a table for people. Progress is a bar on a terminal, elsewhere lines.
"""

from __future__ import annotations

import glob
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from precision.text import one_line

_CELL = 100_000
"""Most characters of a value in a table: more than any value for people has."""
EVERY_S = 10.0
"""Longest silence without a terminal."""
SLOW_S = 2.0
"""A step that takes longer gets its line."""
line_at = time.monotonic()
"""Time of this process's last line of progress."""
is_command = False
"""Whether this process is one command, in which silence is counted across blocks instead of from each block's start."""


def note_line(*, block: bool = False) -> None:
    """Count the silence from now on; the start of a `block` does so only in a process that is no command."""
    global line_at
    if not (block and is_command):
        line_at = time.monotonic()


def is_due(steps: int, passed_s: float) -> bool:
    """Return whether a line is due, so many steps and seconds after the last one: the next step may come too late."""
    return passed_s >= EVERY_S or (
        steps > 0 and (passed_s > SLOW_S * steps or passed_s * (steps + 1) / steps > EVERY_S)
    )


@contextmanager
def counted(what: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a bar that disappears afterwards, or lines. Yield a function that takes how many of `total` are done and, if
    there is one, a remark that is shown beside it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with _lines(what, total) as show_line:
            yield show_line
        return
    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda done, remark="": progress.update(task, completed=done, description=remark)


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """Show a spinner while the block runs, or a line every EVERY_S."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        with _lines(f"note: {what}", 0):
            yield


@contextmanager
def _lines(what: str, total: int) -> Iterator[Callable[..., None]]:
    note_line(block=True)
    began, ended, lock = time.monotonic(), threading.Event(), threading.Lock()
    done, remark, said_done, said_at = 0, "", 0, began

    def say_if_due() -> float:
        """Print a line if it is due; return the seconds to the next line."""
        nonlocal said_done, said_at
        with lock:
            now = time.monotonic()
            if now - line_at >= EVERY_S or is_due(done - said_done, now - said_at):
                said_done, said_at = done, now
                note_line()
                parts = [what, f"{done}/{total}" if total else "", remark, f"({now - began:.0f} s)"]
                print(" ".join(filter(None, parts)), file=sys.stderr, flush=True)
            return max(0.0, line_at + EVERY_S - time.monotonic())

    def show(now_done: int, now_remark: str = "") -> None:
        nonlocal done, remark
        done, remark = now_done, now_remark
        say_if_due()

    def watch() -> None:
        while not ended.wait(say_if_due()):
            pass

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        thread.join()


def emit(result: dict[str, Any]) -> None:
    """Print a result as one line of JSON, which has no NaN and no infinity: they are null."""
    print(json.dumps(_finite(result), allow_nan=False), flush=True)


def emit_or_print(result: dict[str, Any], as_json: bool) -> None:
    """Print a result as one line of JSON or as a table."""
    if as_json:
        emit(result)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None)
    for key, value in result.items():
        said = json.dumps(value) if isinstance(value, dict | list) else str(value)
        table.add_row(Text(key, style="bold"), Text(one_line(said, _CELL)))  # not as markup: it may come from a file
    Console().print(table)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shipped_names(incomplete: str) -> list[str]:
    """Return the shipped recipes that complete a word in a shell, which takes files where none fits."""
    from pipeline.config.loader import SHIPPED

    return sorted(path.stem for path in SHIPPED.glob(f"{glob.escape(incomplete)}*.yaml"))


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
RecipeArgument = typer.Argument(
    help="YAML file, or the name of a recipe that comes with Even Keel, such as demo.",
    show_default=False,
    autocompletion=shipped_names,
)
RecipePath = Annotated[Path, RecipeArgument]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key; repeat at will.")
]
SizesFolder = Annotated[
    Path | None, typer.Option(help="Folder with the model's config.json, where model.path is not on this machine.")
]


def check_recipe_or_run(source: Path) -> None:
    """Raise RecipeError for a path that is neither a recipe nor a run; the loader would call it a missing recipe."""
    from pipeline.config.loader import SHIPPED, find_recipe
    from pipeline.errors import RecipeError
    from precision.text import did_you_mean, one_line

    if not (source / "recipe.yaml").is_file() and not find_recipe(source).is_file():
        shipped = did_you_mean(source.name, (path.stem for path in SHIPPED.glob("*.yaml")))
        raise RecipeError(
            f"{one_line(source, 200)}: no recipe and no run directory of that name; `evenkeel runs list` shows runs"
            f"{shipped}"
        )
