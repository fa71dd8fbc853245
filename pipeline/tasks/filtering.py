"""A filter of the user's own: which rows of the data are problems of the task.

    def short(answer, metadata):        # prompt, answer, metadata: what it names, it gets
        return len(answer) < 10 and metadata["level"] != "hard"

It is asked for every row, training and held out, at each start. Groups of a run are numbers of rows, so what it kept is
part of the data's digest (pipeline.tasks.digest): a run whose filter has changed its mind is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config.task_sections import DataTask
from pipeline.errors import RecipeError
from pipeline.own_function import own_function, truth_of
from pipeline.tasks.base import Problem
from pipeline.tasks.columns import problem_of
from pipeline.tasks.rows import read_rows
from precision.text.short import one_line, quoted

GIVEN = ("prompt", "answer", "metadata")
"""What a filter may name."""


def filtered(path: Path, section: DataTask) -> tuple[list[Problem], tuple[str, ...]]:
    """The problems of a file, and how many rows were left out, for people. Raises RecipeError, with file and row, for
    what is no problem, and for a filter that cannot be imported, fails, or says neither true nor false."""
    kept = _asked(path, section)
    problems = [problem for problem, keeps in kept if keeps]
    out = len(kept) - len(problems)
    notes = (f"{path}: {out} of {len(kept)} rows are left out by {section.filter}",) if out else ()
    return problems, notes


def kept_rows(path: Path, section: DataTask) -> bytes:
    """One byte a row of a file: 1 where it is kept. Raises as `filtered` does."""
    return bytes(keeps for _, keeps in _asked(path, section))


def _asked(path: Path, section: DataTask) -> list[tuple[Problem, bool]]:
    rows = ((row.where, problem_of(row, section)) for row in read_rows(path))
    if section.filter is None:
        return [(problem, True) for _, problem in rows]
    function, names = own_function("task.filter", section.filter, GIVEN)
    return [(problem, _kept(where, problem, section.filter, function, names)) for where, problem in rows]


def _kept(where: str, problem: Problem, name: str, function: Callable[..., Any], names: frozenset[str]) -> bool:
    given = dict(prompt=problem.text, answer=problem.answer, metadata=problem.metadata)
    try:
        said = function(**{key: value for key, value in given.items() if key in names})
    except Exception as error:
        raise RecipeError(
            f"{where}: task.filter {name} failed ({type(error).__name__}: {one_line(error, 200)}); correct it"
        ) from error
    if (truth := truth_of(said)) is None:
        raise RecipeError(f"{where}: task.filter {name} returned {quoted(said)}, expected True or False; correct it")
    return truth
