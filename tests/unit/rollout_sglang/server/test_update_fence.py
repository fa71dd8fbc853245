"""The fence in front of an engine: what needs a key, what needs a number, and who waits for whom."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_sglang.server import update_fence
from rollout_sglang.server.update_fence import UPDATE_HEADER, Fence, UpdateFence, access, check_arguments


async def call(app: Any, path: str, *, key: str | None = "key", number: int | None = None, kind: str = "http") -> Any:
    """The status of the answer; for a websocket, the code with which it was closed."""
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    headers += [] if number is None else [(UPDATE_HEADER.lower().encode(), str(number).encode())]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {}

    await app(dict(type=kind, path=path, headers=headers), receive, send)
    return sent[0].get("status", sent[0].get("code"))


async def serves(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200})


@pytest.mark.parametrize(
    ("path", "key", "number", "status"),
    [
        ("/health", None, None, 200),
        ("/health_generate", None, None, 401),
        ("/generate", None, None, 401),
        ("/generate", "wrong", None, 401),
        ("/generate", "key", None, 200),
        ("/pause_generation", "key", None, 409),
        ("/pause_generation", "wrong", 10, 401),
        ("/pause_generation", "key", 9, 409),
        ("/pause_generation", "key", 10, 200),
        ("/readable_weights/../pause_generation", "key", None, 409),
        ("/a_route_of_a_later_release", "key", None, 409),
    ],
)
def test_what_a_call_needs(path: str, key: str | None, number: int | None, status: int) -> None:
    app = UpdateFence(serves, key="key", floor=10)
    assert asyncio.run(call(app, path, key=key, number=number)) == status


def test_a_websocket_needs_the_key() -> None:
    app = UpdateFence(serves, key="key", floor=0)
    assert asyncio.run(call(app, "/v1/realtime", key=None, kind="websocket")) == 1008


def test_a_lower_number_is_refused_from_the_first_call_of_the_higher_one() -> None:
    async def main() -> list[str | None]:
        fence = Fence()
        assert await fence.enter(5) is None
        waiting = asyncio.create_task(fence.enter(6))
        await asyncio.sleep(0)
        late = await fence.enter(5)
        assert not waiting.done(), "a load under way must not end in the middle of its successor's"
        fence.leave(5)
        return [late, await waiting]

    late, went_on = asyncio.run(main())
    assert late is not None
    assert "was overtaken by 6" in late
    assert went_on is None


def test_a_call_that_was_overtaken_while_it_waited_is_refused() -> None:
    async def main() -> str | None:
        fence = Fence()
        await fence.enter(5)
        waiting = [asyncio.create_task(fence.enter(number)) for number in (6, 7)]
        await asyncio.sleep(0)
        fence.leave(5)
        return (await asyncio.gather(*waiting))[0]

    assert "was overtaken by 7" in (asyncio.run(main()) or "")


def test_a_call_that_hangs_costs_its_successor_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_fence, "DRAIN_DEADLINE_S", 0.05)

    async def main() -> str | None:
        fence = Fence()
        await fence.enter(5)
        return await fence.enter(6)

    assert "still at work" in (asyncio.run(main()) or "")


@pytest.mark.parametrize("wrong", [dict(tokenizer_worker_num=2), dict(grpc_port=1), dict(smg_grpc_mode=True)])
def test_servers_that_the_fence_would_not_stand_before_do_not_start(wrong: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match=next(iter(wrong))):
        check_arguments(SimpleNamespace(**wrong))
    check_arguments(SimpleNamespace(tokenizer_worker_num=1, grpc_port=None))


def test_a_path_that_is_not_known_is_fenced() -> None:
    assert access("/v1/models/x") == "free"
    assert access("/healthy") == access("/generate/") == "fenced"
