"""Sort the digits: prompt `5190472=`, answer `0124579`. Small enough to learn on a CPU within minutes."""

from __future__ import annotations

import random

from pipeline.config.task_sections import SortDigitsTask
from pipeline.tasks.base import GeneratedTask, Problem, uniform_int


class SortDigits(GeneratedTask):
    """`min_digits` to `max_digits` digits, the number and each digit uniform."""

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
        """Each digit moved by ±1 with probability `demonstration_noise`, clipped to 0 … 9."""
        return "".join(move_digit(int(digit), self._noise, rng) for digit in answer)


def move_digit(digit: int, chance: float, rng: random.Random) -> str:
    """The digit, moved by ±1 with probability `chance`, clipped to 0 … 9."""
    moves, up = rng.random() < chance, rng.random() < 0.5
    return str(min(9, max(0, digit + (1 if up else -1)))) if moves else str(digit)
