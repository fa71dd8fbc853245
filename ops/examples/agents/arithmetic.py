"""A task that needs a tool: products that a tiny model cannot compute, and that Python can.

Demonstrations teach a habit that is mostly wrong: the model calls the tool in `call_share` of them, and guesses in the
others. Once it has called, it copies what the tool said. RL has to find that calling pays.
"""

from __future__ import annotations

import random

from pipeline.tasks.task import GeneratedTask, Problem, uniform_int


class Products(GeneratedTask):
    """Products of two numbers of two digits, as 37*48. The conversation's characters are those of a folder without a
    chat template: > user, : assistant, < tool, ! a call, and the end token behind each message."""

    characters = "0123456789*#>:<!"
    reward = "pipeline.rewards.verifiers:exact_match"

    def __init__(self, seed: int, num_prompts: int = 2000, call_share: float = 0.2) -> None:
        super().__init__(name="products", seed=seed, num_prompts=num_prompts)
        self._call_share = call_share

    def draw(self, rng: random.Random) -> Problem:
        first, second = uniform_int(rng, 10, 99), uniform_int(rng, 10, 99)
        return Problem(text=f"{first}*{second}", answer=str(first * second))

    def demonstration(self, index: int) -> tuple[str, str]:
        rng = random.Random(f"products/demonstration/{index}")
        problem = self.draw(rng)
        asked = f">{problem.text}<|end|>:"
        if rng.random() < 0.5:  # the turn behind the tool's answer
            return f"{asked}!{problem.text}<|end|><{problem.answer}<|end|>:", problem.answer
        calls = rng.random() < self._call_share
        return asked, f"!{problem.text}" if calls else str(uniform_int(rng, 100, 9801))
