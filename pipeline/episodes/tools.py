"""Give the policy tools: Python and a shell in the sandbox, a calculator, and those of MCP servers.

    Tools ── open ──▶ Workspace of an episode ── call ─┬▶ its process and folder in the sandbox (toolbox)
      │                                                └▶ another, with its MCP servers (mcp_servers)
      └ spare processes: one that an episode has left is emptied, and serves the next

A call that fails is an observation for the policy, not a fault of the episode. So is code of the policy that takes too
long or ends its process; an MCP server that does either is a fault of the episode's environment.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from pipeline.config.task_sections import McpServer
from pipeline.episodes.host import EpisodeFailedError, EpisodeHost, Pipe
from pipeline.episodes.toolbox import calculated
from pipeline.errors import MachineError, RecipeError
from pipeline.importing import absent, how_to_install
from pipeline.rewards.messages import START_DEADLINE_S
from pipeline.rewards.worker_process import TOOLBOX, Sandbox
from precision.text import JsonError, one_line, parse_json

MCP_SERVERS = "pipeline.episodes.mcp_servers:McpServers"
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

    def __init__(
        self,
        names: Sequence[str],
        *,
        mcp: Mapping[str, McpServer] | None = None,
        sandbox: Sandbox | None,
        deadline_s: float,
        memory_mib: int,
    ) -> None:
        """`names` are built-in tools; `list_servers` adds those of `mcp`. Raises RecipeError for what starts processes
        in a sandbox that allows none, and for a variable that is not set, MachineError without the package."""
        starting = "mcp" if mcp else "tools names shell, which" if "shell" in names else None
        if starting and sandbox is not None and sandbox.rung == "landlock":
            raise RecipeError(
                f"episode.{starting} starts processes, and the landlock sandbox of this machine allows none: install "
                "bubblewrap (Debian: apt install bubblewrap), or leave it out"
            )
        if mcp and absent(("mcp",)):
            raise MachineError(f"episode.mcp needs the package mcp, of the extra mcp: {how_to_install('mcp')}")
        self.schemas: tuple[Mapping[str, Any], ...] = tuple(map(_schema, names))
        self.servers = {name: _with_values(name, server) for name, server in (mcp or {}).items()}
        """Name of an MCP server → its command and variables."""
        self.server_of: dict[str, str] = {}
        """Tool → the MCP server that has it."""
        self._sandbox, self.deadline_s, self._memory_mib = sandbox, deadline_s, memory_mib
        self._spare: dict[str, list[EpisodeHost]] = {TOOLBOX: [], MCP_SERVERS: []}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in (*self._spare[TOOLBOX], *self._spare[MCP_SERVERS]):
            host.close()

    async def list_servers(self) -> None:
        """Add the tools of the MCP servers. Raises RecipeError where one does not answer, or a name is taken."""
        if not self.servers:
            return
        place = _Place(self, MCP_SERVERS, servers=self.servers)
        try:
            listed = await place.ask(dict(list=[*self.servers]), START_DEADLINE_S)
        except EpisodeFailedError as error:
            raise RecipeError(f"episode.mcp: {error}; correct its command, or leave it out") from None
        finally:
            await place.close()
        owners = {one["function"]["name"]: "episode.tools" for one in self.schemas}
        for server, function in listed:
            name, owner = function["name"], f"episode.mcp.{server}"
            if name in owners:
                raise RecipeError(f"{owner} has a tool {name}, as {owners[name]} has; leave one of the two out")
            owners[name], self.server_of[name] = owner, server
            self.schemas += (dict(type="function", function=function),)

    def open(self) -> Workspace:
        """Return the tools of one episode."""
        return Workspace(self)

    async def take_host(self, code: str) -> EpisodeHost:
        """Return a process of this code that no other episode uses, with an empty folder."""
        if self._spare[code]:
            return self._spare[code].pop()
        return await asyncio.to_thread(EpisodeHost, code, self._memory_mib, self._sandbox)

    async def give_back(self, code: str, host: EpisodeHost) -> None:
        """End what runs in the process, and empty its folder for another episode."""
        if await asyncio.to_thread(host.clean):
            self._spare[code].append(host)
        else:
            await asyncio.to_thread(host.close)


def _with_values(name: str, server: McpServer) -> dict[str, Any]:
    """Return the command of a server and the variables that it gets, for the socket to its process: not in a file."""
    if unset := [one for one in server.env if one not in os.environ]:
        raise RecipeError(f"episode.mcp.{name}.env names {unset[0]}, which is not set; export it, or leave it out")
    return dict(command=server.command, env={one: os.environ[one] for one in server.env})


class Workspace:
    """The tools of one episode."""

    def __init__(self, tools: Tools) -> None:
        self._server_of = tools.server_of
        self._names = frozenset(one["function"]["name"] for one in tools.schemas)
        self._toolbox = _Place(tools, TOOLBOX)
        self._servers = _Place(tools, MCP_SERVERS, servers=tools.servers)
        self._one_at_a_time = asyncio.Lock()

    async def call(self, name: str, arguments: str) -> ToolResult:
        """Call a tool with arguments as JSON text. Raises EpisodeFailedError where an MCP server ends, or takes longer
        than the deadline."""
        if name not in self._names:
            return ToolResult(
                f"error: there is no tool {name}; there are {', '.join(sorted(self._names))}", failed=True
            )
        try:
            given = parse_json(arguments.encode(errors="replace"))
        except JsonError:
            given = None
        if (server := self._server_of.get(name)) is not None:
            if not isinstance(given, dict):
                return ToolResult("error: expected a JSON object", failed=True)
            async with self._one_at_a_time:
                return await self._servers.call(server=server, name=name, arguments=given)
        key, _ = _ARGUMENTS[name]
        argument = given.get(key) if isinstance(given, dict) else given
        if not isinstance(argument, str):
            return ToolResult(f'error: expected {{"{key}": text}}', failed=True)
        if name == "calculator":  # it runs no code of the policy
            return ToolResult(*calculated(argument))
        async with self._one_at_a_time:
            try:
                return await self._toolbox.call(name=name, argument=argument)
            except EpisodeFailedError as error:
                return ToolResult(f"error: {error}; its state is lost, its files stay", failed=True)

    async def close(self) -> None:
        """End what runs, and leave the processes to another episode."""
        await self._toolbox.close()
        await self._servers.close()


class _Place:
    """The process and the folder of one episode's tools of one kind, from the first call on."""

    def __init__(self, tools: Tools, code: str, **options: Any) -> None:
        self._tools, self._code, self._options = tools, code, options
        self._host: EpisodeHost | None = None
        self._pipe: Pipe | None = None

    async def ask(self, call: Mapping[str, Any], deadline_s: float) -> Any:
        """Return the answer to a call. Raises EpisodeFailedError, and ends what runs, if it fails or takes longer."""
        if self._host is None:
            self._host = await self._tools.take_host(self._code)
        try:
            async with asyncio.timeout(deadline_s):
                if self._pipe is None:
                    self._pipe = await self._host.open()
                    await self._pipe.send(dict(reset={}, options=self._options))
                    await self._pipe.receive()
                await self._pipe.send(dict(step=call))
                answer = await self._pipe.receive()
        except TimeoutError:
            self._end()
            raise EpisodeFailedError(f"it took more than {deadline_s:g} s") from None
        except EpisodeFailedError:
            self._end()
            raise
        if "ok" not in answer:
            self._end()
            raise EpisodeFailedError(one_line(str(answer.get("failed")), 500))
        return answer["ok"]

    async def call(self, **call: Any) -> ToolResult:
        """Return the result of a tool. Raises as `ask`."""
        match await self.ask(call, self._tools.deadline_s):
            case [str(text), bool(failed)]:
                return ToolResult(text, failed)
            case other:  # code of the policy may write to the socket
                raise EpisodeFailedError(f"it answered {other!r:.100}")

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    async def close(self) -> None:
        self._end()
        if self._host is not None:
            host, self._host = self._host, None
            await self._tools.give_back(self._code, host)
