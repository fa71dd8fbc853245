"""What a task is, and how held-out problems are kept apart from training ones.

A problem is held out when the hash of its prompt text says so (1 in 16), whatever the seed. So a held-out prompt was
never trained on by construction, in this run or in any other run of the same task.
"""

from __future__ import annotations

import hashlib
import random
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.errors import RecipeError

HELD_OUT_ONE_IN = 16
_MAX_DRAWS = 10_000


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One question and what the reward compares the response with."""

    text: str
    """What the reward gets as the prompt, and what says whether the problem is held out; of messages the contents,
    without the system's."""
    answer: str
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation, for the chat template. Empty: `text` is the user's turn, if there is a template."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Plain data for the reward."""
    source: str = ""
    """Which source of a mixture it comes from."""
    reward: str = ""
    """The verifier of a mixture's problem; otherwise the task says it."""
    where: str = field(default="", compare=False)
    """File and row, for messages; empty where there is none."""


class Task(Protocol):
    """Where prompts come from and what scores the responses."""

    num_prompts: int
    """Training problems of one epoch."""
    num_held_out: int
    """Held-out problems that `held_out` knows."""
    reward: str
    """`package.module:function` of the verifier; see `pipeline.rewards.verifiers`. Empty in a mixture."""
    characters: str | None
    """Every character of prompts and answers, for a character tokenizer; None when the task is open text."""
    notes: Sequence[str]
    """Sentences about the data that its user should see before a run begins."""
    chat_template: bool
    """Whether prompts are wrapped as a user turn of the tokenizer's chat template."""

    def problem(self, index: int) -> Problem:
        """Return training problem `index`, 0 ≤ index < num_prompts; the same for the same index, always."""
        raise NotImplementedError

    def held_out(self, index: int) -> Problem:
        """Return held-out problem `index`, 0 ≤ index < num_held_out."""
        raise NotImplementedError

    def demonstration(self, index: int) -> tuple[str, str] | None:  # noqa: ARG002
        """Return (prompt, target) number `index` ≥ 0 for `evenkeel sft`; None when the task has no demonstrations."""
        return None


ASKED_OF_A_TASK = (*Task.__annotations__, *(name for name in vars(Task) if not name.startswith("_")))
"""What a class of the user's own must have."""


def is_held_out(text: str) -> bool:
    """Whether the problem with this prompt text is kept for evaluation."""
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def normalized(text: str) -> str:
    """The text as far as it makes another question: without its case, its white space and its forms of one letter."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def check_index(index: int, count: int, what: str) -> None:
    """Raises IndexError unless 0 ≤ index < count."""
    if not 0 <= index < count:
        raise IndexError(f"{what} {index} does not exist, expected 0 to {count - 1}")


class GeneratedTask(Task, ABC):
    """A task whose problems are made from (seed, index). A subclass says how to draw one problem, and has `characters`
    and `reward`.

    Only `random.Random.random()` is called, the one method whose sequence Python promises to keep for a seed, so a run
    resumed under a later Python meets the same problems.
    """

    chat_template = False
    notes: Sequence[str] = ()

    def __init__(self, *, name: str, seed: int, num_prompts: int) -> None:
        self._name = name
        self._seed = seed
        self.num_prompts = self.num_held_out = num_prompts

    @abstractmethod
    def draw(self, rng: random.Random) -> Problem:
        """One problem from the task's whole distribution."""

    def distort(self, answer: str, rng: random.Random) -> str:  # noqa: ARG002
        """The target of a demonstration for `answer`; a subclass may add mistakes, to leave room for RL."""
        return answer

    def problem(self, index: int) -> Problem:
        check_index(index, self.num_prompts, "problem")
        return self._draw_from(self._rng("train", index), held_out=False)

    def held_out(self, index: int) -> Problem:
        check_index(index, self.num_held_out, "held-out problem")
        return self._draw_from(self._rng("held-out", index), held_out=True)

    def demonstration(self, index: int) -> tuple[str, str]:
        rng = self._rng("demonstration", index)
        problem = self._draw_from(rng, held_out=False)
        return problem.text, self.distort(problem.answer, rng)

    def _rng(self, stream: str, index: int) -> random.Random:
        return random.Random(f"{self._name}/{stream}/{self._seed}/{index}")

    def _draw_from(self, rng: random.Random, *, held_out: bool) -> Problem:
        for _ in range(_MAX_DRAWS):
            problem = self.draw(rng)
            if is_held_out(problem.text) == held_out:
                return problem
        side = "held-out" if held_out else "training"
        raise RecipeError(
            f"task {self._name} found no {side} problem in {_MAX_DRAWS} draws: too few different prompts exist; "
            "make the task larger"
        )


def uniform_int(rng: random.Random, low: int, high: int) -> int:
    """An integer in [low, high], both included, from one call of `rng.random()`."""
    return low + int(rng.random() * (high - low + 1))
