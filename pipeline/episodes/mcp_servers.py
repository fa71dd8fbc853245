"""Speak to the MCP servers of one episode by the official package `mcp`, in the sandbox, where the servers run too.

The process is forked by `pipeline.episodes.host`, which imports the package. A server is a child of it: it sees what
the sandbox shows, and ends with the episode, as does whatever it has started.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import IO, Any

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp_types import CONNECTION_CLOSED

from pipeline.child_process import dying_with_this, with_own_python
from pipeline.episodes.toolbox import MOST_CHARACTERS

_LAST_WORDS_BYTES = 2000


class McpServers:
    """The servers of one episode, each started by the first call of a tool of its own.

    `servers`: name → {"command": words, "env": variables}. `step` gets {"server", "name", "arguments"} and returns
    (text, whether the call failed), or {"list": names}, and returns (server, function) of each tool. It raises
    ConnectionError for a server that cannot be started or is gone.
    """

    def __init__(self, servers: Mapping[str, Mapping[str, Any]]) -> None:
        self._servers = servers
        self._clients: dict[str, Client] = {}
        self._logs: dict[str, IO[str]] = {}
        self._open = AsyncExitStack()  # left open: the end of the episode kills this process and the servers

    async def reset(self, task: Mapping[str, Any]) -> list[Any]:  # noqa: ARG002
        return []

    async def step(self, call: Mapping[str, Any]) -> Any:
        if "list" in call:
            return [(server, tool) for server in call["list"] for tool in await self._list(server)]
        client = await self._client(call["server"])
        try:
            result = await client.call_tool(call["name"], call["arguments"])
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:  # or the server's own number for anything: then it still answers
                try:
                    await client.list_tools(cache_mode="bypass")
                except MCPError:
                    raise ConnectionError(self._ended(call["server"], error)) from None
            return f"error: {error}"[:MOST_CHARACTERS], True
        text = "\n".join(map(_words, result.content))
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        return text[:MOST_CHARACTERS], result.is_error

    async def _list(self, server: str) -> list[dict[str, Any]]:
        client, tools, page = await self._client(server), list[Any](), None
        while page is None or page.next_cursor is not None:
            page = await client.list_tools(cursor=None if page is None else page.next_cursor)
            tools += page.tools
        return [dict(name=one.name, description=one.description or "", parameters=one.input_schema) for one in tools]

    async def _client(self, name: str) -> Client:
        """Return the client of a server, which is started if need be. Raises ConnectionError if it cannot be."""
        if name not in self._clients:
            server = self._servers[name]
            self._logs[name] = log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - as long as its server
            words = dying_with_this(signal.SIGKILL) + with_own_python(server["command"])
            parameters = StdioServerParameters(
                command=words[0],
                args=words[1:],
                env=dict(TMPDIR=os.environ["TMPDIR"]) | server["env"],
                encoding_error_handler="replace",
            )
            client = Client(stdio_client(parameters, errlog=log))
            try:
                self._clients[name] = await self._open.enter_async_context(client)
            except Exception as error:  # noqa: BLE001 - whatever the package raises is the answer
                raise ConnectionError(self._ended(name, error)) from None
        return self._clients[name]

    def _ended(self, name: str, error: Exception) -> str:
        """Say why a server is of no use: by the last line that it has written, or else by the error of its client."""
        log = self._logs[name].fileno()
        size = os.fstat(log).st_size
        said = os.pread(log, _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES)).decode(errors="replace").strip()
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        command = self._servers[name]["command"][0]
        return f"the MCP server {name} ({command}) ended, or cannot be started: {said.rpartition(chr(10))[2] or error}"


def _words(block: Any) -> str:
    """Return a block of a result as the policy reads it."""
    for one in (block, getattr(block, "resource", None)):
        if (text := getattr(one, "text", None)) is not None:
            return str(text)
    return f"[{block.type}, which is no text]"
