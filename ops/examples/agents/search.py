"""Questions about a folder of text files, with a search over them (SQLite's FTS5) as the policy's tool.

    episode:
      environment: ops.examples.agents.search:Search
      options: {folder: data/corpus}
      turns: 8

The answer is scored by the task's reward: `step` gives none.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Search:
    """An instance is one episode: it ends with the first message that calls no tool."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "search",
                "description": "Find the passages that hold these words, the best first.",
                "parameters": {"type": "object", "properties": {"words": {"type": "string"}}, "required": ["words"]},
            },
        },
    )

    def __init__(self, folder: str, passages: int = 3) -> None:
        self._passages = passages
        self._index = sqlite3.connect(":memory:")
        self._index.execute("CREATE VIRTUAL TABLE passages USING fts5(file, text)")
        for file in sorted(Path(folder).glob("*.txt")):
            for text in file.read_text(encoding="utf-8").split("\n\n"):
                self._index.execute("INSERT INTO passages VALUES (?, ?)", (file.name, text.strip()))

    async def reset(self, task: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the messages with which the episode begins."""
        return list(task["messages"])

    async def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, str]], None, bool]:
        """Answer the calls of a message, or end the episode."""
        calls = message.get("tool_calls") or []
        found = [
            dict(role="tool", tool_call_id=call["id"], content=self._search(call["function"]["arguments"]))
            for call in calls
        ]
        return found, None, not calls

    def _search(self, arguments: str) -> str:
        try:
            words = str(json.loads(arguments)["words"])
        except (ValueError, KeyError, TypeError):
            return 'expected {"words": text}'
        query = " OR ".join('"' + word.replace('"', "") + '"' for word in words.split())
        rows = (
            self._index.execute(
                "SELECT file, text FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT ?", (query, self._passages)
            ).fetchall()
            if query
            else []
        )
        return "\n\n".join(f"{file}: {text}" for file, text in rows) or "nothing found"
