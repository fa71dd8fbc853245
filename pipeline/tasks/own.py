"""A task of the user's own: a class with what pipeline.tasks.base.Task asks for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pipeline.config.task_sections import OwnTask
from pipeline.errors import RecipeError
from pipeline.tasks.base import Task
from precision.text import one_line

_ASKED = [name for name in vars(Task) if not name.startswith("_")]


def own_task(section: OwnTask, seed: int) -> Task:
    """An instance of the class. Raises RecipeError for one that cannot be imported or made, and for one that lacks
    something."""
    module, _, name = section.class_.partition(":")
    try:
        made: Any = getattr(import_module(module), name)(seed=seed, **section.options)
        missing = [asked for asked in _ASKED if not hasattr(made, asked)]
    except Exception as error:
        raise RecipeError(
            f"task.class {section.class_} cannot be made ({type(error).__name__}: {one_line(error, 200)}); it is "
            "called as Class(seed=…, **task.options): correct it, or put the folder that holds it on PYTHONPATH"
        ) from error
    if missing:
        raise RecipeError(
            f"task.class {section.class_} lacks {', '.join(missing)}; write what pipeline.tasks.base.Task asks for, or "
            "derive it from pipeline.tasks.base.GeneratedTask"
        )
    return made  # type: ignore[no-any-return]
