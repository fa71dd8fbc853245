"""The built-in tools: each episode has a process and a folder of its own, and a call that fails is an answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pipeline.episodes.tools import ToolResult, Tools, Workspace
from pipeline.errors import RecipeError
from pipeline.rewards.worker_process import TOOLBOX, Sandbox
from tests.support.sandboxes import sandbox_of

NAMES = ("python", "shell", "calculator")


@pytest.fixture(params=[None, "bubblewrap", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox | None:
    return None if request.param is None else sandbox_of(request.param)


def with_tools(work: Callable[[Tools], Awaitable[Any]], sandbox: Sandbox | None, deadline_s: float = 30.0) -> Any:
    async def run() -> Any:
        names = [one for one in NAMES if one != "shell" or sandbox is None or sandbox.rung != "landlock"]
        async with Tools(names, sandbox=sandbox, deadline_s=deadline_s, memory_mib=1024) as tools:
            return await work(tools)

    return asyncio.run(run())


async def python(workspace: Workspace, code: str) -> ToolResult:
    return await workspace.call("python", json.dumps(dict(code=code)))


def test_python_works_as_a_notebook(sandbox: Sandbox | None) -> None:
    async def work(tools: Tools) -> list[ToolResult]:
        workspace = tools.open()
        found = [
            await python(workspace, code)
            for code in ("import math\nx = 6", "print('x is', x)\nx * math.pi", "1 / 0", "x", "x = (", "exit(3)", "x")
        ]
        await workspace.close()
        return found

    first, second, third, fourth, fifth, sixth, last = with_tools(work, sandbox)
    assert first == ToolResult("")
    assert second == ToolResult("x is 6\n18.84955592153876\n")
    assert third.failed
    assert third.text.endswith("ZeroDivisionError: division by zero\n")
    assert fourth == ToolResult("6\n")
    assert fifth.failed
    assert "SyntaxError" in fifth.text
    assert sixth.failed
    assert last == ToolResult("6\n")


def test_a_call_that_hangs_or_kills_its_process_is_answered_and_files_stay(sandbox: Sandbox | None) -> None:
    async def work(tools: Tools) -> list[ToolResult]:
        workspace = tools.open()
        found = [await python(workspace, "open('kept', 'w').write('here')\nx = 1")]
        began = time.monotonic()
        found.append(await python(workspace, "while True: pass"))
        assert time.monotonic() - began < 60.0
        found += [await python(workspace, code) for code in ("import os; os._exit(1)", "open('kept').read()", "x")]
        await workspace.close()
        return found

    wrote, hung, died, kept, lost = with_tools(work, sandbox, deadline_s=3.0)
    assert wrote == ToolResult("")
    assert hung.text == "error: it took more than 3 s; its state is lost, its files stay"
    assert died.text == "error: its process ended; its state is lost, its files stay"
    assert kept == ToolResult("'here'\n")
    assert "NameError" in lost.text


def test_an_episode_finds_nothing_of_another(sandbox: Sandbox | None) -> None:
    async def work(tools: Tools) -> None:
        first, second = tools.open(), tools.open()
        await python(first, "open('secret', 'w').write('here'); x = 1")
        look = "import os; print(os.listdir('.')); 'x' in globals()"
        assert (await python(second, look)).text == "[]\nFalse\n"
        await first.close()
        third = tools.open()  # in the process that the first had
        assert (await python(third, look)).text == "[]\nFalse\n"
        await second.close()
        await third.close()
        assert len(tools._spare[TOOLBOX]) == 2

    with_tools(work, sandbox)


@pytest.mark.parametrize("rung", [None, "bubblewrap"])
def test_a_shell_has_a_folder_and_no_network_in_the_sandbox(rung: str | None) -> None:
    async def work(tools: Tools) -> list[ToolResult]:
        workspace = tools.open()
        commands = ("echo hello > a; cat a; exit 3", "ls", "sleep 1000 &", f"cat {__file__}")
        found = [await workspace.call("shell", json.dumps(dict(command=one))) for one in commands]
        await workspace.close()
        return found

    wrote, listed, _, read = with_tools(work, None if rung is None else sandbox_of(rung))
    assert wrote == ToolResult("hello\n\n[exit status 3]", failed=True)
    assert listed == ToolResult("a\n")
    assert read.failed == (rung is not None)


def test_a_shell_is_refused_where_nothing_may_be_started() -> None:
    with pytest.raises(RecipeError, match="install bubblewrap"):
        Tools(["shell"], sandbox=sandbox_of("landlock"), deadline_s=1.0, memory_mib=512)


@pytest.mark.parametrize(
    ("expression", "text", "failed"),
    [
        ("(3 + 4) * 5 / 2", "17.5", False),
        ("84 / 2", "42", False),
        ("2 ** 100", str(2**100), False),
        ("-7 // 2 % 3", "2", False),
        ("1 / 0", "error: division by zero", True),
        ("2 ** 10 ** 10", "error: the result is too large", True),
        ("__import__('os')", "error: only numbers, + - * / // % ** and parentheses are known", True),
        ("", "error: invalid syntax (<call>, line 0)", True),
    ],
)
def test_the_calculator(expression: str, text: str, failed: bool) -> None:
    async def work(tools: Tools) -> ToolResult:
        return await tools.open().call("calculator", json.dumps(dict(expression=expression)))

    assert with_tools(work, None) == ToolResult(text, failed)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [("browser", "{}", "there is no tool browser"), ("python", "{}", 'expected {"code"'), ("python", "[", "expected")],
)
def test_a_wrong_call_is_answered(name: str, arguments: str, said: str) -> None:
    async def work(tools: Tools) -> ToolResult:
        return await tools.open().call(name, arguments)

    answer = with_tools(work, None)
    assert answer.failed
    assert said in answer.text
