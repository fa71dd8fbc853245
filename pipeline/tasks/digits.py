"""Generate the two tasks that a tiny model learns on a CPU within minutes.

    sort_digits     5190472=  ▸  0124579
    spell_digits    5190472=  ▸  0a1b2c4e5f7h9j

The demonstrations of spell_digits teach a mistake: for three of the digits most of them carry the next digit's letter.
Greedy decoding then starts out wrong on every prompt with such a digit, while sampling is sometimes right. RL has to
find the rarer habit and make it the only one. Pass rates spread with the number of such digits. Answers are long enough
(two tokens a digit) for small numerical gaps between learner and engine to add up.
"""

from __future__ import annotations

import random

from pipeline.config.task_sections import SortDigitsTask, SpellDigitsTask
from pipeline.tasks.task import GeneratedTask, Problem, uniform_int


class SortDigits(GeneratedTask):
    """The task of sorting `min_digits` to `max_digits` digits; their number and each digit are uniform."""

    characters = "0123456789="
    reward = "pipeline.rewards.verifiers:exact_match"

    def __init__(self, section: SortDigitsTask, seed: int) -> None:
        super().__init__(name=section.name, seed=seed, num_prompts=section.num_prompts)
        self._min_digits = section.min_digits
        self._max_digits = section.max_digits
        self._noise = section.demonstration_noise

    def draw(self, rng: random.Random) -> Problem:
        count = uniform_int(rng, self._min_digits, self._max_digits)
        digits = [str(uniform_int(rng, 0, 9)) for _ in range(count)]
        return Problem(text="".join(digits) + "=", answer="".join(sorted(digits)))

    def distort(self, answer: str, rng: random.Random) -> str:
        """Move each digit by ±1 with probability `demonstration_noise`, clipped to 0 … 9."""
        return "".join(move_digit(int(digit), self._noise, rng) for digit in answer)


def move_digit(digit: int, chance: float, rng: random.Random) -> str:
    """Return the digit, moved by ±1 with probability `chance`, clipped to 0 … 9."""
    moves, up = rng.random() < chance, rng.random() < 0.5
    return str(min(9, max(0, digit + (1 if up else -1)))) if moves else str(digit)


LETTERS = "abcdefghij"
MISSPELT = "368"
"""Digits that demonstrations misspell; 9, which has no next letter, is not among them."""


class SpellDigits(GeneratedTask):
    """The task of sorting `min_digits` to `max_digits` digits with their letters; number and digits are uniform."""

    characters = "0123456789=" + LETTERS
    reward = "pipeline.rewards.verifiers:exact_match"

    def __init__(self, section: SpellDigitsTask, seed: int) -> None:
        super().__init__(name=section.name, seed=seed, num_prompts=section.num_prompts)
        self._section = section

    def draw(self, rng: random.Random) -> Problem:
        count = uniform_int(rng, self._section.min_digits, self._section.max_digits)
        digits = sorted(uniform_int(rng, 0, 9) for _ in range(count))
        answer = "".join(f"{digit}{LETTERS[digit]}" for digit in digits)
        order = sorted(digits, key=lambda _: rng.random())
        return Problem(text="".join(map(str, order)) + "=", answer=answer)

    def distort(self, answer: str, rng: random.Random) -> str:
        """Move each digit as in `SortDigits`; then misspell each 3, 6 and 8 with probability `misspelt_share`."""
        digits = [move_digit(int(digit), self._section.demonstration_noise, rng) for digit in answer[::2]]
        slips = [rng.random() < self._section.misspelt_share for _ in digits]
        letters = [
            LETTERS[int(digit) + (slip and digit in MISSPELT)] for digit, slip in zip(digits, slips, strict=True)
        ]
        return "".join(digit + letter for digit, letter in zip(digits, letters, strict=True))
