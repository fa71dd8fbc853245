"""Give the policy tools: Python and a shell in the sandbox, and a calculator.

    Tools ── open ──▶ Workspace of an episode ── call ──▶ its process and folder in the sandbox (toolbox)
      └ spare processes: one that an episode has left is emptied, and serves the next

A call that fails, takes too long or ends its process is an observation for the policy, not a fault of the episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from pipeline.episodes.host import EpisodeFailedError, EpisodeHost, Pipe
from pipeline.episodes.toolbox import calculated
from pipeline.errors import RecipeError
from pipeline.rewards.worker_process import TOOLBOX, Sandbox
from precision.text import JsonError, one_line, parse_json

_ARGUMENTS = {
    "python": ("code", "Run Python code and get what it prints, and the value of its last expression. Names stay."),
    "shell": ("command", "Run a shell command in a folder of its own and get what it prints."),
    "calculator": ("expression", "Compute an arithmetic expression, such as (3 + 4) * 5 / 2."),
}
"""Built-in tool → its argument and its description."""


def _schema(name: str) -> dict[str, Any]:
    argument, description = _ARGUMENTS[name]
    parameters = dict(type="object", properties={argument: dict(type="string")}, required=[argument])
    return dict(type="function", function=dict(name=name, description=description, parameters=parameters))


@dataclass(frozen=True)
class ToolResult:
    """What a tool answered, for the policy to read."""

    text: str
    failed: bool = False


class Tools:
    """An async context manager of a run's tools."""

    def __init__(self, names: Sequence[str], *, sandbox: Sandbox | None, deadline_s: float, memory_mib: int) -> None:
        """`names` are built-in tools. Raises RecipeError for a shell in a sandbox that starts no process."""
        if "shell" in names and sandbox is not None and sandbox.rung == "landlock":
            raise RecipeError(
                "episode.tools names shell, but the landlock sandbox of this machine starts no process: install "
                "bubblewrap (Debian: apt install bubblewrap), or leave shell out"
            )
        self.schemas: tuple[Mapping[str, Any], ...] = tuple(map(_schema, names))
        self._sandbox, self.deadline_s, self._memory_mib = sandbox, deadline_s, memory_mib
        self._spare: list[EpisodeHost] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._spare:
            host.close()

    def open(self) -> Workspace:
        """Return the tools of one episode."""
        return Workspace(self)

    async def take_host(self) -> EpisodeHost:
        """Return a process that no other episode uses, with an empty folder."""
        if self._spare:
            return self._spare.pop()
        return await asyncio.to_thread(EpisodeHost, TOOLBOX, self._memory_mib, self._sandbox)

    async def give_back(self, host: EpisodeHost) -> None:
        """End what runs in the process, and empty its folder for another episode."""
        if await asyncio.to_thread(host.clean):
            self._spare.append(host)
        else:
            await asyncio.to_thread(host.close)


class Workspace:
    """The tools of one episode, with a process and a folder of its own from the first call that needs them."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._names = frozenset(one["function"]["name"] for one in tools.schemas)
        self._host: EpisodeHost | None = None
        self._pipe: Pipe | None = None
        self._one_at_a_time = asyncio.Lock()

    async def call(self, name: str, arguments: str) -> ToolResult:
        """Call a tool with arguments as JSON text."""
        if name not in self._names:
            return ToolResult(
                f"error: there is no tool {name}; there are {', '.join(sorted(self._names))}", failed=True
            )
        key, _ = _ARGUMENTS[name]
        try:
            given = parse_json(arguments.encode(errors="replace"))
            argument = given[key] if isinstance(given, dict) else given
            if not isinstance(argument, str):
                raise KeyError(key)
        except (JsonError, KeyError):
            return ToolResult(f'error: expected {{"{key}": text}}', failed=True)
        if name == "calculator":  # it runs no code of the policy
            return ToolResult(*calculated(argument))
        async with self._one_at_a_time:
            return await self._run(name, argument)

    async def _run(self, name: str, argument: str) -> ToolResult:
        try:
            async with asyncio.timeout(self._tools.deadline_s) as limit:
                if self._pipe is None:
                    if self._host is None:
                        self._host = await self._tools.take_host()
                    self._pipe = await self._host.open()
                    await self._pipe.send(dict(reset={}))
                    await self._pipe.receive()
                await self._pipe.send(dict(step=dict(name=name, argument=argument)))
                answer = await self._pipe.receive()
        except (EpisodeFailedError, TimeoutError) as error:
            self._end()
            why = f"it took more than {self._tools.deadline_s:g} s" if limit.expired() else str(error)
            return ToolResult(f"error: {why}; its state is lost, its files stay", failed=True)
        if "failed" in answer:
            return ToolResult(f"error: {one_line(answer['failed'], 500)}", failed=True)
        text, failed = answer["ok"]
        return ToolResult(str(text), bool(failed))

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    async def close(self) -> None:
        """End what runs, and leave the process to another episode."""
        self._end()
        if self._host is not None:
            host, self._host = self._host, None
            await self._tools.give_back(host)
