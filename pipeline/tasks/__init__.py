"""Tasks: where prompts come from. To add one: a file here, a section in `pipeline.config.recipe`, a case below."""

from __future__ import annotations

from pipeline.config.task_sections import DataTask, OwnTask, SortDigitsTask, SpellDigitsTask
from pipeline.tasks.base import Problem, Task
from pipeline.tasks.data import Data
from pipeline.tasks.digest import check_digest
from pipeline.tasks.mixture import Mixture, Source
from pipeline.tasks.order import PromptOrder
from pipeline.tasks.own import own_task
from pipeline.tasks.sort_digits import SortDigits
from pipeline.tasks.spell_digits import SpellDigits

__all__ = ["Problem", "PromptOrder", "Task", "build_task"]


def build_task(section: SortDigitsTask | SpellDigitsTask | DataTask | OwnTask, seed: int) -> Task:
    """The task of the recipe. Raises RecipeError when its files cannot be used."""
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
        case OwnTask():
            return own_task(section, seed)
