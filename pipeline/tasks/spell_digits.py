"""Sort the digits and spell each: prompt `5190472=`, answer `0a1b2c4e5f7h9j`.

The demonstrations teach a mistake: for three of the digits most demonstrations carry the next digit's letter. Greedy
decoding then starts out wrong on every prompt that has one of them, while sampling is sometimes right: RL has to find
the rarer habit and make it the only one. Pass rates spread with the number of such digits, and answers are long enough
(two tokens a digit) for small numerical gaps between learner and engine to add up.
"""

from __future__ import annotations

import random

from pipeline.config.task_sections import SpellDigitsTask
from pipeline.tasks.base import GeneratedTask, Problem, uniform_int
from pipeline.tasks.sort_digits import move_digit

LETTERS = "abcdefghij"
MISSPELT = "368"
"""The digits that demonstrations mistake. None is 9, so that every one has a next letter."""


class SpellDigits(GeneratedTask):
    """`min_digits` to `max_digits` digits, the number and each digit uniform."""

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
        """Each digit moved by ±1 with probability `demonstration_noise`; then each 3, 6 and 8 misspelt with probability
        `misspelt_share`."""
        digits = [move_digit(int(digit), self._section.demonstration_noise, rng) for digit in answer[::2]]
        return "".join(digit + self._letter(digit, rng) for digit in digits)

    def _letter(self, digit: str, rng: random.Random) -> str:
        slips = rng.random() < self._section.misspelt_share
        return LETTERS[int(digit) + (slips and digit in MISSPELT)]
