"""Tools of MCP servers: a real server of the official package, asked through its real client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import tests.support
from pipeline.config.task_sections import McpServer
from pipeline.episodes.host import EpisodeFailedError, HostDiedError
from pipeline.episodes.tools import ToolResult, Tools, Workspace
from pipeline.errors import MachineError, RecipeError
from tests.support.sandboxes import sandbox_of

SERVER = str(Path(tests.support.__file__).with_name("mcp_server.py"))
WORDS = McpServer(command=("python", SERVER))


def with_servers(
    work: Callable[[Tools], Awaitable[Any]],
    mcp: Mapping[str, McpServer] | None = None,
    *,
    names: Sequence[str] = (),
    rung: str | None = None,
    deadline_s: float = 120.0,
) -> Any:
    async def run() -> Any:
        sandbox = None if rung is None else sandbox_of(rung)
        own = dict(sandbox=sandbox, deadline_s=deadline_s, memory_mib=2048)
        async with Tools(names, mcp=mcp or dict(words=WORDS), **own) as tools:
            await tools.list_servers()
            return await work(tools)

    return asyncio.run(run())


async def called(workspace: Workspace, name: str, /, **arguments: Any) -> ToolResult:
    return await workspace.call(name, json.dumps(arguments))


@asynccontextmanager
async def opened(tools: Tools) -> AsyncIterator[Workspace]:
    """The tools of an episode, whose servers are gone afterwards."""
    workspace, before = tools.open(), len(servers())
    try:
        yield workspace
    finally:
        await workspace.close()
    await until(lambda: len(servers()) <= before)


def servers() -> list[psutil.Process]:
    """The living servers of this test, and what they leave behind."""
    found = []
    for one in psutil.Process().children(recursive=True):
        try:
            if SERVER in one.cmdline() or one.cmdline()[:1] == ["sleep"]:
                found.append(one)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not holds():
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("rung", [None, "bubblewrap"])
def test_tools_are_listed_and_each_episode_has_servers_of_its_own(
    rung: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(tools: Tools) -> None:
        schemas = {one["function"]["name"]: one["function"] for one in tools.schemas}
        assert {"calculator", "count", "refuse"} <= schemas.keys()
        assert "how many letters" in schemas["count"]["description"]
        assert schemas["count"]["parameters"]["properties"]["word"]["type"] == "string"

        async with opened(tools) as first:
            assert (await first.call("calculator", '"6*7"')).text == "42"
            assert not servers()  # none before the first call of its tools
            assert (await called(first, "count", word="sea")).text == "sea has 3 letters call 1"
            assert (await called(first, "count", word="lake")).text == "lake has 4 letters call 2"
            async with opened(tools) as second:
                assert (await called(second, "count", word="sea")).text == "sea has 3 letters call 1"
                assert len(servers()) == 2
                assert (await called(first, "keep", text="a")).text == "a.kept"
                assert (await called(second, "keep", text="b")).text == "b.kept"

            assert await called(first, "seen", name="EPISODE_WORD") == ToolResult("given")
            for secret in ("OTHER_WORD", "EVENKEEL_API_KEY"):
                assert await called(first, "seen", name=secret) == ToolResult("no such variable")

            refused, wrong = await called(first, "refuse"), await called(first, "count", letters=3)
            assert refused.failed
            assert "no such word" in refused.text
            assert wrong.failed
            assert await called(first, "refuse_by_protocol") == ToolResult("error: no such language", failed=True)
            assert await first.call("count", "[") == ToolResult("error: expected a JSON object", failed=True)
            assert len((await called(first, "long")).text) == 1 << 20

    for name, value in (("EPISODE_WORD", "given"), ("OTHER_WORD", "secret"), ("EVENKEEL_API_KEY", "secret")):
        monkeypatch.setenv(name, value)
    words = McpServer(command=("python", SERVER), env=("EPISODE_WORD",))
    with_servers(work, dict(words=words), names=["calculator"], rung=rung)


@pytest.mark.slow
@pytest.mark.parametrize("rung", [None, "bubblewrap"])
def test_a_server_that_is_killed_in_a_call_is_a_fault_and_the_next_episode_has_another(rung: str | None) -> None:
    async def work(tools: Tools) -> None:
        async with opened(tools) as killed:
            call = asyncio.create_task(called(killed, "hang"))
            await until(lambda: len(servers()) == 2)  # it has started a process, hence is in the call
            for one in servers():
                if SERVER in one.cmdline():
                    os.kill(one.pid, signal.SIGKILL)
            with pytest.raises(EpisodeFailedError, match=r"the MCP server words \(python\) ended"):
                await call
        async with opened(tools) as ended:
            with pytest.raises(EpisodeFailedError, match=r"the MCP server words \(python\) ended"):
                await called(ended, "end")
        async with opened(tools) as last:
            assert (await called(last, "count", word="sea")).text == "sea has 3 letters call 1"

    with_servers(work, rung=rung)


@pytest.mark.slow
@pytest.mark.parametrize("rung", [None, "bubblewrap"])
def test_a_server_dies_with_the_process_that_asks_it(rung: str | None) -> None:
    async def work(tools: Tools) -> None:
        async with opened(tools) as workspace:
            call = asyncio.create_task(called(workspace, "hang"))
            await until(lambda: len(servers()) == 2)
            running = servers()
            (server,) = (one for one in running if SERVER in one.cmdline())
            assert workspace._servers._host is not None
            workspace._servers._host._process.kill()
            with pytest.raises(HostDiedError):
                await call
            psutil.wait_procs([server], 120.0)
            assert not server.is_running()
            for one in running:  # without a sandbox nobody ends what a server has left
                with suppress(psutil.NoSuchProcess):
                    one.kill()

    with_servers(work, rung=rung)


@pytest.mark.slow
def test_a_server_that_hangs_is_a_fault_within_the_deadline_and_leaves_nothing() -> None:
    async def work(tools: Tools) -> None:
        began = time.monotonic()
        async with opened(tools) as workspace:
            with pytest.raises(EpisodeFailedError, match="it took more than 8 s"):
                await called(workspace, "hang")
        assert time.monotonic() - began < 120.0

    with_servers(work, deadline_s=8.0)


@pytest.mark.parametrize(
    ("mcp", "said"),
    [
        (dict(words=McpServer(command=("python", "-c", "raise SystemExit('no key')"))), "cannot be started: no key"),
        pytest.param(
            dict(words=McpServer(command=("no-such-program",))),
            r"words \(no-such-program\) .* cannot be started: .*No such file",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dict(a=WORDS, b=WORDS), "episode.mcp.b has a tool count, as episode.mcp.a has", marks=pytest.mark.slow
        ),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_at_the_start(mcp: Mapping[str, McpServer], said: str) -> None:
    async def work(tools: Tools) -> None:
        raise AssertionError

    before = {*psutil.Process().children()}
    with pytest.raises(RecipeError, match=said):
        with_servers(work, mcp)
    assert {*psutil.Process().children()} <= before


def test_a_machine_without_the_package_is_told_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MachineError, match=r"episode.mcp needs the package mcp, of the extra mcp: pip install '?mcp"):
        Tools([], mcp=dict(words=WORDS), sandbox=None, deadline_s=1.0, memory_mib=512)


def test_a_variable_that_is_not_set_is_named() -> None:
    words = McpServer(command=("python", SERVER), env=("NO_SUCH_WORD",))
    with pytest.raises(RecipeError, match=r"episode\.mcp\.words\.env names NO_SUCH_WORD, which is not set"):
        Tools([], mcp=dict(words=words), sandbox=None, deadline_s=1.0, memory_mib=512)


def test_servers_are_refused_where_nothing_may_be_started() -> None:
    with pytest.raises(RecipeError, match=r"episode\.mcp starts processes.* install bubblewrap"):
        Tools([], mcp=dict(words=WORDS), sandbox=sandbox_of("landlock"), deadline_s=1.0, memory_mib=512)
