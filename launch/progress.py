"""Progress on the terminal, on stderr: stdout is for results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def counted(what: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar that is gone afterwards. Call what it yields with how many of `total` are done and, if there is one, a
    remark that is shown beside it."""
    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)

        def show(done: int, remark: str = "") -> None:
            progress.update(task, completed=done, description=remark)

        yield show
