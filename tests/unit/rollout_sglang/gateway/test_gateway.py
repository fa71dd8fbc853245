"""The gateway, asked by the official libraries of OpenAI and Anthropic. The session behind it is a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import anthropic
import httpx
import openai
import pytest

from pipeline.data.batch import StopReason
from pipeline.episodes.episode import EpisodeEndedError, Session, Turn
from pipeline.errors import EngineUnavailableError
from rollout_sglang.gateway.server import Gateway

WEATHER = dict(
    type="function",
    function=dict(name="weather", description="Now.", parameters=dict(type="object", properties=dict(city={}))),
)
CALLS = [
    dict(id=f"call_{n}", type="function", function=dict(name="weather", arguments=json.dumps(dict(city=city))))
    for n, city in enumerate(("Zürich", "東京"))
]


class Script:
    """A session that answers by the last message, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]] = []
        self.pause_s = 0.0

    def count(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> int:
        return len(messages) + len(tools)

    async def turn(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Turn:
        number = len(self.asked)
        self.asked.append((messages, tools))
        await asyncio.sleep(self.pause_s)
        said = str(messages[-1]["content"])
        if said == "over":
            raise EpisodeEndedError(StopReason.TURNS)
        if said == "long":
            raise EpisodeEndedError(StopReason.CONTEXT)
        if said == "bad":
            raise ValueError("two users in a row")
        if said == "away":
            raise EngineUnavailableError("no engine answers")
        message: dict[str, Any] = dict(role="assistant", content=f"{said} → {number} ✓ " + "é" * 300)
        if tools and said == "weather?":
            message |= dict(content="", reasoning_content="two cities", tool_calls=CALLS)
        finish = "tool_calls" if "tool_calls" in message else "stop"
        return Turn(message=message, finish=cast(Any, finish), prompt_tokens=11, sampled_tokens=7)


MADE: list[openai.AsyncOpenAI | anthropic.AsyncAnthropic] = []
"""Clients to close after a test."""
Work = Callable[[Gateway, str, Script], Awaitable[Any]]


def with_gateway(work: Work) -> Any:
    async def run() -> Any:
        script = Script()
        async with Gateway() as gateway:
            try:
                return await work(gateway, gateway.open(cast(Session, script)), script)
            finally:
                while MADE:
                    await MADE.pop().close()

    return asyncio.run(run())


def of_openai(gateway: Gateway, key: str, retries: int = 0) -> openai.AsyncOpenAI:
    client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=retries)
    MADE.append(client)
    return client


def of_anthropic(gateway: Gateway, key: str, retries: int = 0) -> anthropic.AsyncAnthropic:
    client = anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=retries)
    MADE.append(client)
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_openais_library_gets_text_and_counts(stream: bool) -> None:
    async def work(gateway: Gateway, key: str, script: Script) -> None:
        client = of_openai(gateway, key)
        asked = dict(model="any", messages=[dict(role="user", content=[dict(type="text", text="hello")])])
        expected = "hello → 0 ✓ " + "é" * 300
        if stream:
            options = dict(stream_options=dict(include_usage=True))
            chunks = [one async for one in await client.chat.completions.create(stream=True, **asked, **options)]
            assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == expected
            assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == "stop"
            assert chunks[-1].usage.total_tokens == 18
        else:
            answer = await client.chat.completions.create(**asked)
            assert answer.choices[0].message.content == expected
            assert answer.usage.completion_tokens == 7
        assert script.asked[0][0] == (dict(role="user", content="hello"),)

    with_gateway(work)


@pytest.mark.parametrize("stream", [False, True])
def test_openais_library_gets_parallel_calls_and_returns_results(stream: bool) -> None:
    async def work(gateway: Gateway, key: str, script: Script) -> None:
        client = of_openai(gateway, key)
        asked = dict(model="any", messages=[dict(role="user", content="weather?")], tools=[WEATHER])
        if stream:
            calls: dict[int, list[str]] = {}
            async for chunk in await client.chat.completions.create(stream=True, **asked):
                for call in chunk.choices[0].delta.tool_calls or ():
                    kept = calls.setdefault(call.index, [call.id, call.function.name, ""])
                    kept[2] += call.function.arguments
                last = chunk.choices[0].finish_reason
            found = [calls[0], calls[1]]
        else:
            choice = (await client.chat.completions.create(**asked)).choices[0]
            found = [[one.id, one.function.name, one.function.arguments] for one in choice.message.tool_calls]
            last = choice.finish_reason
        assert last == "tool_calls"
        assert [(one[0], one[1], json.loads(one[2])["city"]) for one in found] == [
            ("call_0", "weather", "Zürich"),
            ("call_1", "weather", "東京"),
        ]
        results = [dict(role="tool", tool_call_id=one[0], content="sun") for one in found]
        again = [*asked["messages"], dict(role="assistant", content=None, tool_calls=CALLS), *results]
        await client.chat.completions.create(model="any", messages=again, tools=[WEATHER])
        messages, tools = script.asked[1]
        assert messages[1] == dict(role="assistant", content="", tool_calls=CALLS)
        assert messages[2:] == tuple(dict(role="tool", content="sun", tool_call_id=f"call_{n}") for n in range(2))
        assert tools == (WEATHER,)

    with_gateway(work)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_library_gets_calls_and_returns_results(stream: bool) -> None:
    async def work(gateway: Gateway, key: str, script: Script) -> None:
        client = of_anthropic(gateway, key)
        tool = dict(name="weather", description="Now.", input_schema=WEATHER["function"]["parameters"])
        asked = dict(model="any", max_tokens=9, system="Be brief.", tools=[tool])
        first = [dict(role="user", content="weather?")]
        if stream:
            async with client.messages.stream(messages=first, **asked) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(messages=first, **asked)
        assert answer.stop_reason == "tool_use"
        assert answer.usage.output_tokens == 7
        thought, *calls = answer.content
        assert thought.thinking == "two cities"
        assert [(one.id, one.name, one.input["city"]) for one in calls] == [
            ("call_0", "weather", "Zürich"),
            ("call_1", "weather", "東京"),
        ]
        results = [
            dict(type="tool_result", tool_use_id=one.id, content=[dict(type="text", text="sun")]) for one in calls
        ]
        again = [
            *first,
            dict(role="assistant", content=[one.model_dump(exclude_none=True) for one in answer.content]),
            dict(role="user", content=[*results, dict(type="text", text="and now?")]),
        ]
        answer = await client.messages.create(messages=again, **asked)
        assert answer.content[0].text.startswith("and now? → 1")
        messages, tools = script.asked[1]
        assert messages[0] == dict(role="system", content="Be brief.")
        assert messages[2]["reasoning_content"] == "two cities"
        assert [json.loads(one["function"]["arguments"]) for one in messages[2]["tool_calls"]] == [
            dict(city="Zürich"),
            dict(city="東京"),
        ]
        assert [one["role"] for one in messages[3:]] == ["tool", "tool", "user"]
        assert tools == (WEATHER,)
        assert (await client.messages.count_tokens(model="any", messages=first)).input_tokens == 1

    with_gateway(work)


def test_sampling_settings_are_counted_and_several_choices_refused() -> None:
    async def work(gateway: Gateway, key: str, script: Script) -> None:
        client = of_openai(gateway, key)
        messages = [dict(role="user", content="hello")]
        settings = dict(temperature=0.0, top_p=0.1, max_tokens=1, seed=3, stop=["→"])
        answer = await client.chat.completions.create(model="any", messages=messages, **settings)
        assert "→ 0" in answer.choices[0].message.content
        assert gateway.ignored == dict.fromkeys(settings, 1)
        with pytest.raises(openai.BadRequestError, match="n is 2, expected 1"):
            await client.chat.completions.create(model="any", messages=messages, n=2)
        assert len(script.asked) == 1

    with_gateway(work)


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ("over", 403, "the episode has ended: turns"),
        ("long", 400, "the episode has ended: context"),
        ("bad", 400, "two users in a row"),
        ("away", 503, "no engine answers"),
    ],
)
def test_refusals_have_the_form_of_each_protocol(said: str, status: int, words: str) -> None:
    async def work(gateway: Gateway, key: str, script: Script) -> None:
        messages = [dict(role="user", content=said)]
        with pytest.raises(openai.APIStatusError, match=words) as one:
            await of_openai(gateway, key).chat.completions.create(model="any", messages=messages)
        with pytest.raises(anthropic.APIStatusError, match=words) as other:
            await of_anthropic(gateway, key).messages.create(model="any", max_tokens=1, messages=messages)
        assert one.value.status_code == other.value.status_code == status

    with_gateway(work)


def test_only_an_open_key_opens_its_own_episode() -> None:
    async def work(gateway: Gateway, key: str, script: Script) -> None:
        other = Script()
        theirs = gateway.open(cast(Session, other))
        messages = [dict(role="user", content="hello")]
        await of_openai(gateway, theirs).chat.completions.create(model="any", messages=messages)
        assert (len(script.asked), len(other.asked)) == (0, 1)
        gateway.close(theirs)
        for wrong in (theirs, "ek-guessed"):
            with pytest.raises(openai.AuthenticationError):
                await of_openai(gateway, wrong).chat.completions.create(model="any", messages=messages)
            with pytest.raises(anthropic.AuthenticationError):
                await of_anthropic(gateway, wrong).messages.create(model="any", max_tokens=1, messages=messages)
        assert (len(script.asked), len(other.asked)) == (0, 1)

    with_gateway(work)


def test_a_retry_gets_the_first_answer_and_a_new_request_a_new_one() -> None:
    async def work(gateway: Gateway, key: str, script: Script) -> None:
        body = dict(model="any", messages=[dict(role="user", content="hello")])
        headers = {"Authorization": f"Bearer {key}"}

        async def post(**more: str) -> str:
            async with httpx.AsyncClient(base_url=gateway.url, headers={**headers, **more}, trust_env=False) as client:
                answer = await client.post("/v1/chat/completions", json=body)
            return str(answer.json()["choices"][0]["message"]["content"])

        first = await post()
        assert await post(**{"x-stainless-retry-count": "1"}) == first
        second = await post(**{"Idempotency-Key": "a"})
        assert second != first
        assert await post(**{"Idempotency-Key": "a"}) == second
        assert await post(**{"Idempotency-Key": "b"}) != second
        assert len(script.asked) == 3
        script.pause_s = 0.3
        one, other = await asyncio.gather(post(), post())  # the second comes while the first is unanswered
        assert one == other
        assert len(script.asked) == 4

    with_gateway(work)


def test_a_cancelled_request_that_is_asked_again_gets_its_answer() -> None:
    async def work(gateway: Gateway, key: str, script: Script) -> None:
        client, messages = of_openai(gateway, key), [dict(role="user", content="hello")]
        script.pause_s = 0.5
        asked = asyncio.create_task(client.chat.completions.create(model="any", messages=messages))
        while not script.asked:
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await asyncio.sleep(1.0)  # it is sampled meanwhile
        answer = await client.chat.completions.create(model="any", messages=messages)
        assert "→ 0" in answer.choices[0].message.content
        assert len(script.asked) == 1

    with_gateway(work)


def test_two_hundred_episodes_ask_at_once() -> None:
    async def work(gateway: Gateway, _: str, __: Script) -> None:
        scripts = [Script() for _ in range(200)]
        keys = [gateway.open(cast(Session, script)) for script in scripts]
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=60.0, trust_env=False) as http:

            async def episode(number: int) -> None:
                client = openai.AsyncOpenAI(
                    base_url=f"{gateway.url}/v1", api_key=keys[number], http_client=http, max_retries=0
                )
                for turn in range(3):
                    messages = [dict(role="user", content=f"{number}/{turn}")]
                    answer = await client.chat.completions.create(model="any", messages=cast(Any, messages))
                    assert answer.choices[0].message.content.startswith(f"{number}/{turn} → {turn}")

            await asyncio.gather(*map(episode, range(200)))
        assert [len(script.asked) for script in scripts] == [3] * 200

    with_gateway(work)
