"""Prompts that are too long are left out before a run begins, and counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeline.config.task_sections import SortDigitsTask
from pipeline.errors import RecipeError
from pipeline.tasks import Problem, build_task
from pipeline.tasks.mixture import fitting


class Listed:
    """A task of these prompts."""

    characters = None
    chat_template = False
    reward = "x:y"
    notes = ("said before",)

    def __init__(self, training: Sequence[str], held_out: Sequence[str]) -> None:
        self._training, self._held_out = training, held_out

    num_prompts = property(lambda self: len(self._training))
    num_held_out = property(lambda self: len(self._held_out))

    def problem(self, index: int) -> Problem:
        return Problem(text=self._training[index], answer="")

    def held_out(self, index: int) -> Problem:
        return Problem(text=self._held_out[index], answer="")

    def demonstration(self, index: int) -> None:
        """There is none."""


def characters(problems: Sequence[Problem]) -> list[int]:
    return [len(problem.text) for problem in problems]


def test_what_fits_stays_in_its_order_and_the_rest_is_counted() -> None:
    training = ["1" * (index % 5 + 1) for index in range(2500)]
    task = fitting(Listed(training, ["1", "1" * 9, "11"]), characters, 4)
    assert [task.problem(i).text for i in range(task.num_prompts)] == [text for text in training if len(text) <= 4]
    assert [task.held_out(i).text for i in range(task.num_held_out)] == ["1", "11"]
    first, note = task.notes
    assert first == "said before"
    assert "501 of 2503 prompts have more than 4 tokens" in note
    assert note.endswith("the longest, '111111111', has 9")
    with pytest.raises(IndexError, match="problem 2000 does not exist, expected 0 to 1999"):
        task.problem(2000)


@pytest.mark.parametrize(
    ("training", "held_out", "side"), [(["111"], ["1"], "to train on"), (["1"], ["111"], "held out")]
)
def test_a_side_without_prompts_is_refused(training: list[str], held_out: list[str], side: str) -> None:
    with pytest.raises(
        RecipeError, match=rf"1 of 2 prompts have .* has 3, and none is left {side}; raise rollout\.con"
    ):
        fitting(Listed(training, held_out), characters, 2)


def test_generated_prompts_are_not_looked_at() -> None:
    def never(problems: Sequence[Problem]) -> list[int]:
        raise AssertionError

    task = build_task(SortDigitsTask(), seed=0)
    assert fitting(task, never, 1) is task
