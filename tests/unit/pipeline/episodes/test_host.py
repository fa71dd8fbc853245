"""The processes of environments and agents: whatever they do costs their own episode, and nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from pipeline.episodes.host import EpisodeFailedError, EpisodeHost
from pipeline.errors import RecipeError
from pipeline.rewards.worker_process import ConfinedPython, Sandbox
from tests.support.sandboxes import sandbox_of

TASK = dict(prompt="Count.", answer="2")


@pytest.fixture(autouse=True)
def examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture(params=[None, "bubblewrap", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox | None:
    return None if request.param is None else sandbox_of(request.param)


@pytest.fixture
def host(sandbox: Sandbox | None) -> Iterator[EpisodeHost]:
    with EpisodeHost("episode_examples:Counting", 1024, sandbox) as host:
        yield host


async def asked(host: EpisodeHost, *said: str, deadline_s: float = 30.0) -> list[Any]:
    """Reset a fresh environment, give it messages, and return its answers."""
    pipe, found = await host.open(), []
    try:
        for request in (dict(reset=TASK, options=dict(start=0)), *(dict(step=dict(content=one)) for one in said)):
            await pipe.send(request)
            async with asyncio.timeout(deadline_s):
                found.append(await pipe.receive())
    finally:
        pipe.close()
    return found


def test_an_environment_answers_to_its_own_episode(host: EpisodeHost) -> None:
    async def both() -> list[list[Any]]:
        return await asyncio.gather(asked(host, "a", "b"), asked(host, "a"))

    first, second = asyncio.run(both())
    assert first[0]["ok"]["messages"] == [dict(role="user", content="Count.")]
    assert first[0]["ok"]["tools"][0]["function"]["name"] == "count"
    assert first[1]["ok"] == second[1]["ok"] == [[dict(role="user", content="1")], 1.0, False]
    assert first[2]["ok"] == [[dict(role="user", content="2")], 2.0, True]


def test_an_error_is_the_answer_and_the_next_episode_goes_on(host: EpisodeHost) -> None:
    async def one_after_another() -> tuple[list[Any], list[Any]]:
        return await asked(host, "raise"), await asked(host, "a")

    failed, good = asyncio.run(one_after_another())
    assert "ValueError: no such move" in failed[1]["failed"]
    assert good[1]["ok"][1] == 1.0


@pytest.mark.parametrize("how", ["exit", "block", "wait"])
def test_a_process_that_ends_or_hangs_costs_its_episode(host: EpisodeHost, how: str) -> None:
    async def both() -> tuple[BaseException | list[Any], ...]:
        return tuple(
            await asyncio.gather(asked(host, how, deadline_s=2.0), asked(host, "a", "b"), return_exceptions=True)
        )

    broken, good = asyncio.run(both())
    assert isinstance(broken, EpisodeFailedError if how == "exit" else TimeoutError)
    assert isinstance(good, list)
    assert good[2]["ok"][1] == 2.0


def test_closing_kills_a_blocked_process_and_all_that_it_started(host: EpisodeHost) -> None:
    def of_the_host() -> list[psutil.Process]:
        return [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]

    async def run() -> None:
        before = len(of_the_host())
        pipe = await host.open()
        for request in (dict(reset=TASK), dict(step=dict(content="leave"))):
            await pipe.send(request)
            await pipe.receive()
        await pipe.send(dict(step=dict(content="block")))
        assert len(of_the_host()) > before
        pipe.close()
        async with asyncio.timeout(20.0):
            while len(of_the_host()) > before:
                await asyncio.sleep(0.05)

    if host._python.settings["rung"] == "landlock":
        pytest.skip("code under Landlock starts no process")
    asyncio.run(run())


def of(host: EpisodeHost) -> list[psutil.Process]:
    """Living processes of a host, without what bubblewrap keeps outside: the host itself, then its children."""
    started = psutil.Process(host._process.pid)
    inner = started.children() if host._python.settings["rung"] == "bubblewrap" else [started]
    return [one for above in inner for one in (above, *above.children())]


def test_episodes_of_a_host_that_was_killed_start_it_again_once(
    host: EpisodeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where bubblewrap's own process, stopped here, has not seen the host's end."""

    async def run() -> list[list[Any]]:
        psutil.Process(host._process.pid).suspend()
        killed = of(host)[0]
        killed.kill()
        async with asyncio.timeout(20.0):
            while killed.is_running() and killed.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)
        return await asyncio.gather(*(asked(host, "a") for _ in range(8)))

    monkeypatch.setattr("pipeline.episodes.host._END_DEADLINE_S", 0.1)
    with patch.object(host, "_begin", wraps=host._begin) as begin:
        answers = asyncio.run(run())
    assert [one[1]["ok"][1] for one in answers] == [1.0] * 8
    begin.assert_called_once_with()


def test_a_host_that_is_killed_takes_a_blocked_episode_along(host: EpisodeHost) -> None:
    async def run() -> None:
        pipe = await host.open()
        await pipe.send(dict(reset=TASK))
        await pipe.receive()
        await pipe.send(dict(step=dict(content="block")))
        killed, blocked = of(host)
        killed.kill()
        async with asyncio.timeout(20.0):
            while blocked.is_running() and blocked.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)
        pipe.close()

    asyncio.run(run())


def test_a_host_that_ends_while_it_starts_is_started_once_more(sandbox: Sandbox | None) -> None:
    start, started = ConfinedPython.start, list[int]()

    def ends_at_first(self: ConfinedPython, stdin: socket.socket) -> subprocess.Popen[bytes]:
        started.append(0)
        if len(started) > 1:
            return start(self, stdin)
        return subprocess.Popen(["false"], stdin=stdin.fileno(), stderr=subprocess.PIPE)

    with (
        patch.object(ConfinedPython, "start", ends_at_first),
        EpisodeHost("episode_examples:Counting", 1024, sandbox) as host,
    ):
        assert asyncio.run(asked(host, "a"))[1]["ok"][1] == 1.0
    assert len(started) == 2


def test_a_start_removes_the_folder_of_a_host_whose_run_was_killed(tmp_path: Path) -> None:
    with (
        patch.dict(os.environ, TMPDIR=str(tmp_path)),
        patch.object(tempfile, "tempdir", None),
        EpisodeHost("episode_examples:Counting", 1024, None) as host,
    ):
        [left] = tmp_path.iterdir()
        host._process.kill()
        host._process.wait()
        with EpisodeHost("episode_examples:Counting", 1024, None):
            assert not left.exists()


def test_an_agent_asks_by_its_client_and_returns_its_reward(sandbox: Sandbox | None) -> None:
    async def run(host: EpisodeHost) -> list[Any]:
        pipe = await host.open()
        await pipe.send(dict(run=TASK))
        seen = list[Any]()
        while "ok" not in (message := await pipe.receive()):
            seen.append(message)
            await pipe.send(dict(number=message["ask"], message=dict(role="assistant", content=str(len(seen)))))
        pipe.close()
        return [*seen, message]

    with EpisodeHost("episode_examples:asking", 1024, sandbox) as host:
        first, second, end = asyncio.run(run(host))
    assert first["messages"] == [dict(role="user", content="Count.")]
    assert [one["content"] for one in second["messages"]] == ["Count.", "1", "again"]
    assert end == {"ok": 3.0}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("episode_examples:neither", "neither a class nor an `async def run"),
        ("episode_examples:absent", "has no attribute 'absent'"),
        ("no_such_module:Game", "No module named 'no_such_module'"),
    ],
)
def test_code_that_cannot_be_used_is_refused_at_the_start(sandbox: Sandbox | None, code: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        EpisodeHost(code, 1024, sandbox)
