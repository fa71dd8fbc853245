"""An environment and an agent for whole runs; each is the user's code to the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Echo:
    """Asks for digits three times; the reward of a turn is the share of digits in it. It answers with the number of the
    turn and the first digits in it. With `stuck`, the environment of a prompt that begins with 9 never answers."""

    def __init__(self, turns: int = 3, stuck: bool = False) -> None:
        self._turns, self._stuck, self._turn = turns, stuck, 0

    async def reset(self, task: Mapping[str, Any]) -> list[dict[str, str]]:
        while self._stuck and task["prompt"].startswith("9"):
            pass  # nor does it let others run
        return [dict(role="system", content="0"), dict(role="user", content=task["prompt"])]

    async def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, str]], float, bool]:
        said = message["content"]
        digits = "".join(filter(str.isdigit, said))
        self._turn += 1
        share = len(digits) / max(1, len(said))
        return [dict(role="user", content=f"{self._turn}{digits[:3]}")], share / 3, self._turn >= self._turns


async def asking_twice(client: Any, task: Mapping[str, Any]) -> float:
    """Ask the same thing twice, then go on behind the first answer: a branch in each episode."""
    messages = [dict(role="user", content=task["prompt"])]
    first = await client.chat(messages)
    await client.chat(messages)
    last = await client.chat([*messages, first, dict(role="user", content="0")])
    return float(sum(character.isdigit() for character in last["content"]) / max(1, len(last["content"])))
