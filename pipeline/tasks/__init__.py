"""Build a recipe's task. A new task takes a file here, a section in `pipeline.config.task_sections`, a case below."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pipeline.config.task_sections import DataTask, OwnTask, SortDigitsTask, SpellDigitsTask
from pipeline.errors import RecipeError
from pipeline.tasks.data import Data, check_digest
from pipeline.tasks.digits import SortDigits, SpellDigits
from pipeline.tasks.mixture import Mixture, PromptOrder, Source
from pipeline.tasks.task import ASKED_OF_A_TASK, Problem, Task
from precision.text import one_line

__all__ = ["Problem", "PromptOrder", "Task", "build_task"]


def build_task(section: SortDigitsTask | SpellDigitsTask | DataTask | OwnTask, seed: int) -> Task:
    """Return the task of a recipe's section. Raises RecipeError when its files cannot be used, or when the
    user's class cannot be made or lacks an attribute."""
    match section:
        case SortDigitsTask():
            return SortDigits(section, seed)
        case SpellDigitsTask():
            return SpellDigits(section, seed)
        case DataTask():
            check_digest(section)
            if section.sources:
                return Mixture([Source(one.name, one.weight, Data(section.of(one))) for one in section.sources])
            return Data(section)
    # The user's own class.
    module, _, name = section.class_.partition(":")
    try:
        made: Any = getattr(import_module(module), name)(seed=seed, **section.options)
        missing = [asked for asked in ASKED_OF_A_TASK if not hasattr(made, asked)]
    except Exception as error:
        raise RecipeError(
            f"task.class {section.class_} cannot be made ({type(error).__name__}: {one_line(error, 200)}); it is "
            "called as Class(seed=…, **task.options): correct it, or put the folder that holds it on PYTHONPATH"
        ) from error
    if missing:
        raise RecipeError(
            f"task.class {section.class_} lacks {', '.join(missing)}; write the members of pipeline.tasks.task.Task, "
            "or derive it from pipeline.tasks.task.GeneratedTask"
        )
    return made  # type: ignore[no-any-return]
