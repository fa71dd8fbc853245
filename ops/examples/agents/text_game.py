"""A text game of up to 20 turns: find a treasure on a grid by walking, with a hint after each step.

episode:
  environment: ops.examples.agents.text_game:Treasure
  options: {size: 5}
  turns: 20
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

STEPS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}


class Treasure:
    """An instance is one episode. The same task always hides the treasure in the same place."""

    def __init__(self, size: int = 5) -> None:
        self._size = size

    async def reset(self, task: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the messages with which the episode begins."""
        rng = random.Random(f"treasure/{task['prompt']}")
        self._at, self._treasure = (0, 0), (rng.randrange(self._size), 1 + rng.randrange(self._size - 1))
        rules = (
            f"You stand in a corner of a field, {self._size} by {self._size}. Say {', '.join(STEPS)}, one at a time."
        )
        return [dict(role="system", content=rules), dict(role="user", content=self._hint())]

    async def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, str]], float, bool]:
        """Return the messages that answer the policy, the turn's reward, and whether the episode is over."""
        said = message["content"].strip().lower()
        if said not in STEPS:
            return [dict(role="user", content=f"Say one of {', '.join(STEPS)}.")], 0.0, False
        x, y = (min(self._size - 1, max(0, a + b)) for a, b in zip(self._at, STEPS[said], strict=True))
        self._at = x, y
        found = self._at == self._treasure
        return [dict(role="user", content="Found!" if found else self._hint())], float(found), found

    def _hint(self) -> str:
        return f"The treasure is {sum(abs(a - b) for a, b in zip(self._at, self._treasure, strict=True))} steps away."
