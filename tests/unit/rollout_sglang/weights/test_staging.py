"""Orders to stage weights, against servers that know them and servers that do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import pytest

from pipeline.errors import EngineUnavailableError, EngineVersionError
from pipeline.ports.weights import TensorSpec
from rollout_sglang.transport import Transport
from rollout_sglang.weights.staging import PREFIX, Stage

T = TypeVar("T")
TENSOR = TensorSpec(name="model.norm.weight", dtype="bfloat16", shape=(4,))
FOLDER = Path("/policy/000013")


class Server:
    """Answers orders in turn, by (status, states of its ranks)."""

    url = "http://engine"

    def __init__(self, *answers: tuple[int, Sequence[dict[str, str]]]) -> None:
        self._answers = list(answers)
        self.orders: list[dict[str, Any]] = []

    async def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        assert (method, path, options["repeatable"]) == ("POST", "/weights_checker", False)
        self.orders.append(json.loads(options["json"]["action"].removeprefix(PREFIX)))
        status, states = self._answers.pop(0)
        ranks = [
            dict(checksums=state, per_gpu_checksum="", parallelism_info=dict(tp_rank=rank, tp_size=len(states)))
            for rank, state in enumerate(states)
        ]
        return httpx.Response(status, json=dict(success=status == 200, message="said so", ranks=ranks))


def ask(server: Server, act: Callable[[Stage], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(act(Stage(cast(Transport, server), 5.0)))


def state(pending: int = 0, failure: str = "") -> dict[str, str]:
    return dict(pending=str(pending), failure=failure)


@pytest.mark.parametrize("status", [400, 404])
def test_a_server_that_cannot_stage_says_so(status: int) -> None:
    assert ask(Server((status, ())), lambda stage: stage.begin()) is False
    assert ask(Server((status, ())), lambda stage: stage.folder(FOLDER, 5.0)) is False


def test_a_folder_is_staged_when_the_slowest_rank_is_done() -> None:
    server = Server((200, [state(), state(1)]), (200, [state(), state(1)]), (200, [state(), state()]))
    assert ask(server, lambda stage: stage.folder(FOLDER, 5.0)) is True
    assert server.orders == [dict(do="folder", folder=str(FOLDER)), dict(do="wait"), dict(do="wait")]


def test_a_broadcast_is_waited_for() -> None:
    server = Server((200, [state(1)]), (200, [state(1)]), (200, [state()]))
    ask(server, lambda stage: stage.receive("group", [TENSOR], 5.0))
    assert server.orders[0] == dict(
        do="group", group="group", names=["model.norm.weight"], dtypes=["bfloat16"], shapes=[[4]]
    )
    assert not server._answers


def test_what_one_rank_cannot_stage_is_an_error() -> None:
    server = Server((200, [state(1), state(1)]), (200, [state(), state(0, "KeyError: no parameter")]))
    with pytest.raises(EngineVersionError, match="no parameter"):
        ask(server, lambda stage: stage.finish(FOLDER, 5.0))


def test_a_server_that_was_started_again_is_found_out() -> None:
    """Another one may answer at its address, which knows no such order."""
    with pytest.raises(EngineVersionError, match="started again"):
        ask(Server((400, ())), lambda stage: stage.receive_shared("AAAA", 5.0))


def test_waiting_has_a_deadline() -> None:
    server = Server(*[(200, [state(1)])] * 100)
    with pytest.raises(EngineUnavailableError, match=r"within 0\.1 s"):
        ask(server, lambda stage: stage.finish(FOLDER, 0.1))


@pytest.mark.parametrize("strange", [dict(model="abc"), dict(pending="many", failure="")])
def test_an_answer_about_something_else_is_refused(strange: dict[str, str]) -> None:
    with pytest.raises(EngineUnavailableError, match="something else"):
        ask(Server((200, [strange])), lambda stage: stage.begin())


def test_membership_is_asked_without_an_update() -> None:
    assert ask(Server((200, [state() | dict(member="True")])), lambda stage: stage.is_member("group"))
    assert not ask(Server((200, [state() | dict(member="False")])), lambda stage: stage.is_member("group"))
