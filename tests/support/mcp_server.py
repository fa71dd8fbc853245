"""A small MCP server over stdio, written with the official package: good tools, and one for each way to fail."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CONNECTION_CLOSED

server = MCPServer("words")
_counted = 0


@server.tool()
def count(word: str) -> str:
    """Tell how many letters a word has, and how many calls came before."""
    global _counted
    _counted += 1
    return f"{word} has {len(word)} letters call {_counted}"


@server.tool()
def seen(name: str) -> str:
    """Return a variable of the environment."""
    return os.environ.get(name, "no such variable")


@server.tool()
def keep(text: str) -> str:
    """Write a file, and list the folder of this episode."""
    folder = Path(os.environ["TMPDIR"])
    (folder / f"{text}.kept").write_text(text, encoding="utf-8")
    return " ".join(sorted(path.name for path in folder.glob("*.kept")))


@server.tool()
def refuse() -> str:
    raise ToolError("no such word")


@server.tool()
def refuse_by_protocol() -> str:
    """Fail with the number that the client uses for a connection that is closed."""
    raise MCPError(CONNECTION_CLOSED, "no such language")


@server.tool()
def long() -> str:
    return "x" * (3 << 20)


@server.tool()
def hang() -> str:
    """Leave a process behind, and never answer."""
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    time.sleep(1000)
    return ""


@server.tool()
def end() -> str:
    os._exit(3)


if __name__ == "__main__":
    server.run("stdio")
