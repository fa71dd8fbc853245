"""A task without the prompts that are too long: engines would refuse them each time they are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pipeline.errors import RecipeError
from pipeline.tasks.base import GeneratedTask, Problem, Task, check_index
from pipeline.tasks.mixture import Mixture
from precision.text import quoted

_AT_ONCE = 1000


class FittingTask:
    """The problems of `task` whose prompts have `most` tokens or fewer, in the same order. The others are counted.

    All of them are tokenized here, once, so that one with a character that the tokenizer lacks is refused before a run
    begins. Raises ModelError for such a one, and RecipeError when too few are left.
    """

    def __init__(self, task: Task, count: Callable[[Sequence[Problem]], Sequence[int]], most: int) -> None:
        """`count`: tokens of the prompt of each problem."""
        self._task = task
        self.reward, self.characters, self.chat_template = task.reward, task.characters, task.chat_template
        longest = _Longest(most)
        self._training = longest.without(task.num_prompts, task.problem, count)
        self._held_out = longest.without(task.num_held_out, task.held_out, count)
        self.notes = (*task.notes, *longest.said())
        if not self._training or not self._held_out:
            side = "to train on" if not self._training else "held out"
            raise RecipeError(
                f"{longest.said()[0]}, and none is left {side}; raise rollout.context_tokens, or lower "
                "rollout.max_new_tokens"
            )

    @property
    def num_prompts(self) -> int:
        return len(self._training)

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    def problem(self, index: int) -> Problem:
        check_index(index, self.num_prompts, "problem")
        return self._task.problem(self._training[index])

    def held_out(self, index: int) -> Problem:
        check_index(index, self.num_held_out, "held-out problem")
        return self._task.held_out(self._held_out[index])

    def demonstration(self, index: int) -> tuple[str, str] | None:
        return self._task.demonstration(index)


def fitting(task: Task, count: Callable[[Sequence[Problem]], Sequence[int]], most: int) -> Task:
    """The task without what is too long. A generated one, which may have more prompts than can be looked at, comes back
    as it is: its prompts are all of a kind. Of a mixture, each source."""
    if isinstance(task, Mixture):
        return Mixture([replace(one, task=fitting(one.task, count, most)) for one in task.sources])
    return task if isinstance(task, GeneratedTask) else FittingTask(task, count, most)


class _Longest:
    """Counts what does not fit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._too_long = self._looked_at = self._tokens = 0
        self._text = ""

    def without(
        self, number: int, problem: Callable[[int], Problem], count: Callable[[Sequence[Problem]], Sequence[int]]
    ) -> Sequence[int]:
        """The indices, of `number`, of the problems that fit."""
        kept: list[int] = []
        for first in range(0, number, _AT_ONCE):
            indices = range(first, min(number, first + _AT_ONCE))
            problems = [problem(index) for index in indices]
            for index, one, tokens in zip(indices, problems, count(problems), strict=True):
                if tokens <= self._most:
                    kept.append(index)
                else:
                    self._note(one, tokens)
        self._looked_at += number
        return range(number) if len(kept) == number else kept

    def _note(self, problem: Problem, tokens: int) -> None:
        self._too_long += 1
        if tokens > self._tokens:
            self._tokens, self._text = tokens, problem.text

    def said(self) -> tuple[str, ...]:
        """A sentence, where there is something to say."""
        if not self._too_long:
            return ()
        return (
            f"{self._too_long} of {self._looked_at} prompts have more than {self._most} tokens (rollout.context_tokens "
            f"- rollout.max_new_tokens) and are left out; the longest, {quoted(self._text)}, has {self._tokens}",
        )
