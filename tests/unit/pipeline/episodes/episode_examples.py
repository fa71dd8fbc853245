"""Environments and agents for the tests of episodes: good ones, and ones that fail in each way."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Counting:
    """Counts up with each step; it is done at the number that the task names."""

    tools = ({"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}},)

    def __init__(self, start: int = 0) -> None:
        self._number = start

    async def reset(self, task: Mapping[str, Any]) -> list[dict[str, str]]:
        self._last = int(task["answer"])
        return [dict(role="user", content=task["prompt"])]

    async def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, str]], float, bool]:
        self._number += 1
        match message["content"]:
            case "raise":
                raise ValueError("no such move")
            case "exit":
                os._exit(3)
            case "block":
                time.sleep(1000)
            case "wait":
                await asyncio.sleep(1000)
            case "leave":
                subprocess.Popen(["sleep", "1000"], start_new_session=True)
            case "write":
                Path(os.environ["HOME"], "written").write_text("something", encoding="utf-8")
            case "huge":
                return [dict(role="user", content="x" * 10**6)], 0.0, False
        return [dict(role="user", content=str(self._number))], float(self._number), self._number == self._last


async def asking(client: Any, task: Mapping[str, Any]) -> float:
    """Ask until the answer is the task's."""
    messages = [dict(role="user", content=task["prompt"])]
    while (answer := await client.chat(messages))["content"] != task["answer"]:
        messages += [answer, dict(role="user", content="again")]
    return float(len(messages))


def neither() -> None:
    """No environment, and no agent."""
