"""The servers of a teacher: asked in turn, refused when they mean other tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pipeline.errors import EngineUnavailableError, RecipeError
from rollout_sglang.teacher import TeacherServers
from tests.doubles.sglang_double import EngineDouble


@pytest.fixture
def pair() -> Iterator[tuple[EngineDouble, EngineDouble]]:
    with EngineDouble(api_key="key") as first, EngineDouble(api_key="key") as second:
        yield first, second


def servers_of(*doubles: EngineDouble) -> TeacherServers:
    return TeacherServers([double.url for double in doubles], "key", request_deadline_s=5.0)


def test_one_that_fails_is_followed_by_another(pair: tuple[EngineDouble, EngineDouble]) -> None:
    pair[0].generate_faults = ["500"]

    async def ask() -> list[list[float]]:
        servers = servers_of(*pair)
        try:
            with pytest.raises(EngineUnavailableError, match="the teacher did not score a group"):
                await servers.logprobs([5], [[1]])
            return [scored.tolist() for scored in await servers.logprobs([5], [[1], [2, 3]])]
        finally:
            await servers.close()

    assert asyncio.run(ask()) == [[-2 / 8], [-3 / 8, -4 / 8]]


def test_each_server_must_have_the_students_tokenizer(pair: tuple[EngineDouble, EngineDouble]) -> None:
    async def check() -> None:
        servers = servers_of(*pair)
        try:
            await servers.require_same_tokenizer({"12=": [49, 50, 61]})
        finally:
            await servers.close()

    asyncio.run(check())
    pair[1].shifted_ids = 1
    with pytest.raises(RecipeError, match=r"has another tokenizer than model\.path") as refused:
        asyncio.run(check())
    assert pair[1].url in str(refused.value)
