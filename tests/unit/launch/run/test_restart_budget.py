"""How often a process may die: progress of the run refills its budget, standing still does not."""

from __future__ import annotations

import pytest

from launch.run.supervisor import RestartBudget
from pipeline.errors import FatalError


def test_progress_refills_the_budget() -> None:
    budget = RestartBudget(limit=1)
    for progress in range(5):
        budget.spend("engine-0", progress, "the reason")


def test_the_same_words_end_the_run_unless_it_has_progressed_between() -> None:
    budget = RestartBudget(limit=9)
    for progress in (3, 4, 5):
        budget.spend("engine-0", progress, "the reason", "ended with status 3")
    with pytest.raises(
        FatalError, match="engine-0 ended twice in the same way, so it is not started again: the reason"
    ):
        budget.spend("engine-0", 5, "the reason", "ended with status 4")


def test_deaths_without_progress_end_the_run() -> None:
    budget = RestartBudget(limit=2)
    for progress in (3, 4, 4):
        budget.spend("engine-0", progress, "the reason")
    with pytest.raises(FatalError, match="engine-0 died 3 times without progress: the reason"):
        budget.spend("engine-0", 4, "the reason")
