"""Define tasks and problems, and keep held-out problems apart from training problems.

The hash of its prompt text decides whether a problem is held out (1 in 16), whatever the seed. So no run of the same
task was ever trained on a held-out prompt.
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
    """A question and the reference answer for the reward."""

    text: str
    """Prompt text, for the reward and for holding out; for messages, their contents without the system's."""
    answer: str
    messages: tuple[Mapping[str, Any], ...] = ()
    """Conversation for the chat template. If empty, `text` is the user's turn."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Plain data for the reward."""
    source: str = ""
    """Name of the mixture's source that the problem comes from."""
    reward: str = ""
    """Verifier of a mixture's problem; otherwise the task names it."""
    where: str = field(default="", compare=False)
    """File and row, for messages; empty where there is none."""


class Task(Protocol):
    """A source of prompts, and the verifier of the responses."""

    num_prompts: int
    """Training problems of one epoch."""
    num_held_out: int
    reward: str
    """`package.module:function` of the verifier; see `pipeline.rewards.verifiers`. Empty in a mixture."""
    characters: str | None
    """Every character of prompts and answers, for a character tokenizer; None when the task is open text."""
    notes: Sequence[str]
    """Sentences about the data for the user to see before a run begins."""
    chat_template: bool
    """Whether prompts are wrapped as a user turn of the tokenizer's chat template."""

    def problem(self, index: int) -> Problem:
        """Return training problem `index`, 0 ≤ index < num_prompts; always the same for the same index."""
        raise NotImplementedError

    def held_out(self, index: int) -> Problem:
        """Return held-out problem `index`, 0 ≤ index < num_held_out."""
        raise NotImplementedError

    def demonstration(self, index: int) -> tuple[str, str] | None:  # noqa: ARG002
        """Return (prompt, target) number `index` ≥ 0 for `evenkeel sft`; None when the task has no demonstrations."""
        return None


ASKED_OF_A_TASK = (*Task.__annotations__, *(name for name in vars(Task) if not name.startswith("_")))
"""Attributes that a user's own class must have."""


def is_held_out(text: str) -> bool:
    """Return whether the problem with this prompt text is kept for evaluation."""
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def normalized(text: str) -> str:
    """Return the text without differences that make no other question: case, white space, forms of the same letter."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def check_index(index: int, count: int, what: str) -> None:
    """Raise IndexError unless 0 ≤ index < count."""
    if not 0 <= index < count:
        raise IndexError(f"{what} {index} does not exist, expected 0 to {count - 1}")


class GeneratedTask(Task, ABC):
    """A task whose problems are made from (seed, index). A subclass defines `draw`, `characters` and `reward`. Only
    `random.Random.random()` is called, the one method whose sequence Python promises to keep for a seed, so a run
    resumed under a later Python gets the same problems."""

    chat_template = False
    notes: Sequence[str] = ()

    def __init__(self, *, name: str, seed: int, num_prompts: int) -> None:
        self._name = name
        self._seed = seed
        self.num_prompts = self.num_held_out = num_prompts

    @abstractmethod
    def draw(self, rng: random.Random) -> Problem:
        """Return a problem from the task's whole distribution."""

    def distort(self, answer: str, rng: random.Random) -> str:  # noqa: ARG002
        """Return the target of a demonstration for `answer`; a subclass may add mistakes, to leave room for RL."""
        return answer

    def problem(self, index: int) -> Problem:
        check_index(index, self.num_prompts, "problem")
        return self._draw_from(random.Random(f"{self._name}/train/{self._seed}/{index}"), held_out=False)

    def held_out(self, index: int) -> Problem:
        check_index(index, self.num_held_out, "held-out problem")
        return self._draw_from(random.Random(f"{self._name}/held-out/{self._seed}/{index}"), held_out=True)

    def demonstration(self, index: int) -> tuple[str, str]:
        rng = random.Random(f"{self._name}/demonstration/{self._seed}/{index}")
        problem = self._draw_from(rng, held_out=False)
        return problem.text, self.distort(problem.answer, rng)

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
    """Return an integer in [low, high], both included, from one call of `rng.random()`."""
    return low + int(rng.random() * (high - low + 1))
