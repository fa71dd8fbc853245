"""A filter of the user's own: which rows of the data are problems of the task.

    def short(answer, metadata):        # prompt, answer, metadata: what it names, it gets; None for null
        return answer is not None and len(answer) < 10 and metadata["level"] != "hard"

It is asked for every row, training and held out, at each start. Groups of a run are numbers of rows, so what it kept is
part of the data's digest (pipeline.tasks.digest): a run whose filter has changed its mind is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.task_sections import DataTask
from pipeline.errors import RecipeError
from pipeline.own_function import own_function, truth_of
from pipeline.tasks.base import Problem
from pipeline.tasks.columns import problem_of
from pipeline.tasks.rows import read_rows
from precision.text import one_line, quoted

GIVEN = ("prompt", "answer", "metadata")
"""What a filter may name."""


def filtered(path: Path, section: DataTask) -> tuple[list[Problem], tuple[str, ...]]:
    """The problems of a file, and how many rows were left out, for people. Raises RecipeError, with file and row, for
    what is no problem, and for a filter that cannot be imported, fails, or says neither true nor false."""
    asked = _asked(path, section)
    problems = [problem for problem in asked if problem is not None]
    out = len(asked) - len(problems)
    notes = (f"{path}: {out} of {len(asked)} rows are left out by {section.filter}",) if out else ()
    return problems, notes


def kept_rows(path: Path, section: DataTask) -> bytes:
    """One byte a row of a file: 1 where it is kept. Raises as `filtered` does."""
    return bytes(problem is not None for problem in _asked(path, section))


def _asked(path: Path, section: DataTask) -> list[Problem | None]:
    """The problem of each row, None where the filter leaves it out."""
    if section.filter is None:
        return [problem_of(row, section) for row in read_rows(path)]
    function, names = own_function("task.filter", section.filter, GIVEN)
    return [problem_of(row, section, _Filter(section.filter, function, names, row.where)) for row in read_rows(path)]


@dataclass(frozen=True)
class _Filter:
    """The user's function at one row."""

    name: str
    function: Callable[..., Any]
    names: frozenset[str]
    where: str

    def __call__(self, prompt: str | None, answer: str | None, metadata: Mapping[str, Any]) -> bool:
        """Raises RecipeError when it fails, or says neither true nor false."""
        every = dict(prompt=prompt, answer=answer, metadata=metadata)
        given = {name: value for name, value in every.items() if name in self.names}
        null = "".join(f" where {name} is null" for name, value in given.items() if value is None)
        try:
            said = self.function(**given)
        except Exception as error:
            raise RecipeError(
                f"{self.where}: task.filter {self.name} failed{null} ({type(error).__name__}: {one_line(error, 200)}); "
                "correct it"
            ) from error
        if (truth := truth_of(said)) is None:
            raise RecipeError(
                f"{self.where}: task.filter {self.name} returned {quoted(said)}, expected True or False; correct it"
            )
        return truth
