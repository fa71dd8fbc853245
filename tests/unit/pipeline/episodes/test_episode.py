"""One episode in each of its forms: what it records, which budget ends it, and what is a fault."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import tests.support
from pipeline import spans
from pipeline.config.task_sections import McpServer
from pipeline.data.batch import Completion, Prompt, StopReason
from pipeline.data.event_log import EventLog, read_events
from pipeline.episodes.chat_format import ChatFormat
from pipeline.episodes.episode import Budget, Episode, EpisodeRunner
from pipeline.episodes.host import EpisodeFailedError, EpisodeHost
from pipeline.episodes.tools import Tools
from pipeline.errors import DeadlineExceededError
from pipeline.tasks.tokenizer import Tokenizer
from rollout_sglang.gateway.server import Gateway
from tests.support.chat_folders import write_chat_folder

PROMPT = Prompt(group=7, text="6*7", answer="2", tokens=(1,))
BUDGET = Budget(
    turns=8,
    new_tokens=64,
    sampled_tokens=512,
    context_tokens=1024,
    tool_calls=8,
    seconds=60.0,
    step_s=20.0,
    observation_bytes=64,
)
AGENT = """
import json, os, openai
client = openai.OpenAI(max_retries=0)
messages = [dict(role="user", content=json.loads(os.environ["EVENKEEL_TASK"])["prompt"])]
tools = [dict(type="function", function=dict(name="python", parameters={}))]
while True:
    said = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message.content
    if said == "42":
        break
    messages += [dict(role="assistant", content=said or ""), dict(role="user", content="again")]
print("done")
print(json.dumps(dict(reward=len(messages))))
"""


class Policy:
    """An engine that samples given texts, one after another."""

    def __init__(self, tokenizer: Tokenizer, *said: str) -> None:
        self._tokenizer, self._said = tokenizer, deque(said)
        self.read: list[str] = []
        """What it was to continue, as text."""

    async def ask(self, tokens: tuple[int, ...], most: int) -> Completion:
        self.read.append(self._tokenizer.decode(tokens, special=True))
        said = self._said.popleft() if len(self._said) > 1 else self._said[0]
        if said == "away":
            raise DeadlineExceededError("no engine answered")
        ids = [*self._tokenizer.encode(said), self._tokenizer.eos_token_id][:most]
        completion = Completion.given(ids, [-0.5] * len(ids))
        return replace(completion, finish="stop" if ids[-1] == self._tokenizer.eos_token_id else "length")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write_chat_folder(tmp_path / "model", "characters"))


@pytest.fixture
def runner(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EpisodeRunner]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (tmp_path / "run").mkdir()
    log = EventLog(tmp_path / "run", "collector-000001")

    def made(budget: Budget = BUDGET, **how: Any) -> EpisodeRunner:
        return EpisodeRunner(chat=ChatFormat.of(tokenizer), budget=budget, event_log=log, **how)

    return made


def texts(episode: Episode, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The prompt and the trained text of each row."""
    return [
        (
            tokenizer.decode(row.prompt, special=True),
            tokenizer.decode(row.completion.tokens[row.completion.loss_mask].tolist(), special=True),
        )
        for row in episode.rows
    ]


def run_with_tools(runner: Callable[..., EpisodeRunner], policy: Policy, budget: Budget = BUDGET) -> Episode:
    async def run() -> Episode:
        async with Tools(["calculator"], sandbox=None, deadline_s=20.0, memory_mib=512) as tools:
            return await runner(budget, tools=tools).run(PROMPT, policy.ask)

    return asyncio.run(run())


def test_tools_are_called_until_the_policy_answers(runner: Callable[..., EpisodeRunner], tokenizer: Tokenizer) -> None:
    policy = Policy(tokenizer, "!6*7", "42")
    episode = run_with_tools(runner, policy)
    assert policy.read == [">6*7<|end|>:", ">6*7<|end|>:!6*7<|end|><42<|end|>:"]
    assert texts(episode, tokenizer) == [(">6*7<|end|>:", "!6*7<|end|>42<|end|>")]
    assert (episode.text, episode.reward) == ("42", None)
    facts = episode.facts
    assert (facts.stopped, facts.turns, facts.tool_calls) == (StopReason.FINISHED, 2, 1)


@pytest.mark.slow
def test_an_mcp_server_is_a_tool_whose_death_is_a_fault_that_is_retried_once(
    runner: Callable[..., EpisodeRunner], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    words = McpServer(command=("python", str(Path(tests.support.__file__).with_name("mcp_server.py"))))

    async def run() -> Episode:
        async with Tools([], mcp=dict(words=words), sandbox=None, deadline_s=120.0, memory_mib=2048) as tools:
            await tools.list_servers()
            made = runner(tools=tools)
            with pytest.raises(EpisodeFailedError, match=r"the MCP server words .* ended"):
                await made.run(PROMPT, Policy(tokenizer, "!end").ask)
            return await made.run(PROMPT, policy.ask)

    policy = Policy(tokenizer, "!count sea", "!long", "42")
    episode = asyncio.run(run())
    assert policy.read[1].endswith("<sea has 3 letters call 1<|end|>:")
    assert policy.read[2].endswith(f"<{'x' * BUDGET.observation_bytes} {(1 << 20) - 64} bytes left out<|end|>:")
    assert (episode.text, episode.facts.stopped, episode.facts.tool_calls) == ("42", StopReason.FINISHED, 2)
    events = (tmp_path / "run/events/collector-000001.jsonl").read_text(encoding="utf-8").strip().split("\n")
    assert [json.loads(one)["again"] for one in events] == [True, False]


@pytest.mark.parametrize(
    ("changed", "said", "stopped", "turns"),
    [
        (dict(turns=2), "!6*7", StopReason.TURNS, 2),
        (dict(sampled_tokens=12), "!6*7", StopReason.TOKENS, 3),
        (dict(tool_calls=3), "!6*7", StopReason.TOOL_CALLS, 4),
        (dict(context_tokens=40), "!6*7", StopReason.CONTEXT, 4),
    ],
)
def test_a_budget_ends_an_episode_that_is_scored_as_it_stands(
    runner: Callable[..., EpisodeRunner],
    tokenizer: Tokenizer,
    changed: dict[str, Any],
    said: str,
    stopped: StopReason,
    turns: int,
) -> None:
    budget = replace(BUDGET, **changed)
    episode = run_with_tools(runner, Policy(tokenizer, said), budget)
    assert (episode.facts.stopped, episode.facts.turns) == (stopped, turns)
    (row,) = episode.rows
    assert len(row.prompt) + len(row.completion.tokens) <= budget.context_tokens
    assert row.completion.loss_mask.sum() <= budget.sampled_tokens


def test_an_observation_is_cut_to_its_budget(runner: Callable[..., EpisodeRunner], tokenizer: Tokenizer) -> None:
    policy = Policy(tokenizer, "!2**200", "42")
    run_with_tools(runner, policy, replace(BUDGET, observation_bytes=4))
    assert policy.read[1].endswith("<1606 57 bytes left out<|end|>:")


def in_environment(runner: Callable[..., EpisodeRunner], policy: Policy, **changed: Any) -> Episode:
    with EpisodeHost("episode_examples:Counting", 1024, None) as host:
        return asyncio.run(runner(replace(BUDGET, **changed), host=host, options=dict(start=0)).run(PROMPT, policy.ask))


def test_an_environment_gives_messages_and_rewards_by_turn(
    runner: Callable[..., EpisodeRunner], tokenizer: Tokenizer
) -> None:
    policy = Policy(tokenizer, "a", "b")
    episode = in_environment(runner, policy)
    assert policy.read[1] == ">6*7<|end|>:a<|end|>>1<|end|>:"
    assert (episode.reward, episode.facts.turn_rewards) == (3.0, (1.0, 2.0))
    assert episode.facts.stopped is StopReason.FINISHED


@pytest.mark.parametrize(("said", "why"), [("raise", "no such move"), ("exit", "ended"), ("wait", "more than 1 s")])
def test_a_fault_is_tried_once_more_and_then_fails_the_episode(
    runner: Callable[..., EpisodeRunner], tokenizer: Tokenizer, tmp_path: Path, said: str, why: str
) -> None:
    with pytest.raises(EpisodeFailedError, match=why):
        in_environment(runner, Policy(tokenizer, said), step_s=1.0)
    events = (tmp_path / "run/events/collector-000001.jsonl").read_text(encoding="utf-8").strip().split("\n")
    assert ['"again": true' in one.replace('":', '": ').replace("  ", " ") for one in events] == [True, False]
    episode = in_environment(runner, Policy(tokenizer, said, "a", "b"), step_s=1.0)  # the second time it goes well
    assert episode.reward == 3.0


def test_the_time_of_engines_is_not_the_agents(runner: Callable[..., EpisodeRunner], tokenizer: Tokenizer) -> None:
    policy = Policy(tokenizer, "a", "b")

    async def slow(tokens: tuple[int, ...], most: int) -> Completion:
        await asyncio.sleep(1.0)
        return await policy.ask(tokens, most)

    with EpisodeHost("episode_examples:Counting", 1024, None) as host:
        made = runner(replace(BUDGET, seconds=1.5), host=host)
        episode = asyncio.run(made.run(PROMPT, slow))
        assert episode.facts.stopped is StopReason.FINISHED
        assert episode.facts.tool_s < 1.5
        made = runner(replace(BUDGET, seconds=0.5), host=host)
        episode = asyncio.run(made.run(PROMPT, Policy(tokenizer, "a", "wait").ask))
    assert (episode.facts.stopped, episode.facts.turns) == (StopReason.WALL_CLOCK, 2)


def test_the_time_outside_the_policy_is_in_the_trace(
    runner: Callable[..., EpisodeRunner], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with (
        spans.recorded(tmp_path / "run", "collector-000001"),
        EpisodeHost("episode_examples:Counting", 1024, None) as host,
    ):
        episode = asyncio.run(runner(host=host).run(PROMPT, Policy(tokenizer, "a", "b").ask))
    [lines] = spans.read_spans(tmp_path / "run").values()
    assert {line["lane"] for line in lines} == {"episodes/outside the policy"}
    assert [line["turns"] for line in lines] == list(range(episode.facts.turns + 1))
    assert sum(line["seconds"] for line in lines) == pytest.approx(episode.facts.tool_s, abs=1e-4)


def test_an_agent_of_ours_asks_by_its_client(runner: Callable[..., EpisodeRunner], tokenizer: Tokenizer) -> None:
    policy = Policy(tokenizer, "1", "2")
    with EpisodeHost("episode_examples:asking", 1024, None) as host:
        episode = asyncio.run(runner(host=host, is_agent=True).run(PROMPT, policy.ask))
        assert texts(episode, tokenizer) == [(">6*7<|end|>:", "1<|end|>2<|end|>")]
        assert episode.reward == 3.0
        endless = replace(BUDGET, turns=3)
        episode = asyncio.run(runner(endless, host=host, is_agent=True).run(PROMPT, Policy(tokenizer, "1").ask))
        assert (episode.facts.stopped, episode.facts.turns, episode.reward) == (StopReason.TURNS, 3, None)
        with pytest.raises(DeadlineExceededError):  # engines that are away are not for the agent to bear
            asyncio.run(runner(host=host, is_agent=True).run(PROMPT, Policy(tokenizer, "away").ask))


@pytest.mark.parametrize(("kills", "tries"), [(2, 3), (99, 5)])
def test_an_episode_does_not_pay_for_the_death_of_the_process_of_all(
    runner: Callable[..., EpisodeRunner], tokenizer: Tokenizer, tmp_path: Path, kills: int, tries: int
) -> None:
    with EpisodeHost("episode_examples:Counting", 1024, None) as host:

        class Killing(Policy):
            async def ask(self, tokens: tuple[int, ...], most: int) -> Completion:
                if len(self.read) < kills:
                    host._process.kill()
                    host._process.wait()
                return await super().ask(tokens, most)

        made, policy = runner(host=host), Killing(tokenizer, "1")
        if tries <= kills:
            with pytest.raises(EpisodeFailedError, match="the process of all episodes ended"):
                asyncio.run(made.run(PROMPT, policy.ask))
            assert len(policy.read) == tries
        else:
            assert asyncio.run(made.run(PROMPT, policy.ask)).facts.turns == 2
    again = [bool(event["again"]) for event in read_events(tmp_path / "run", "episode_failed")]
    assert again == ([True] * kills)[: tries - 1] + [False] * (kills >= tries)


def test_a_black_box_agent_speaks_openais_protocol(
    runner: Callable[..., EpisodeRunner], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    program = tmp_path / "agent.py"
    program.write_text(AGENT, encoding="utf-8")

    async def run(policy: Policy, **changed: Any) -> Episode:
        async with Gateway() as gateway:
            made = runner(replace(BUDGET, **changed), command=(sys.executable, str(program)), gateway=gateway)
            return await made.run(PROMPT, policy.ask)

    episode = asyncio.run(run(Policy(tokenizer, "1", "2", "42")))
    assert texts(episode, tokenizer) == [(">6*7<|end|>:", "1<|end|>2<|end|>42<|end|>")]
    assert (episode.reward, episode.facts.turns) == (5.0, 3)
    episode = asyncio.run(run(Policy(tokenizer, "1"), turns=2))
    assert (episode.facts.stopped, episode.reward) == (StopReason.TURNS, None)
    episode = asyncio.run(run(Policy(tokenizer, "!6*7"), tool_calls=2))
    assert (episode.facts.stopped, episode.facts.tool_calls) == (StopReason.TOOL_CALLS, 3)
    with pytest.raises(DeadlineExceededError):
        asyncio.run(run(Policy(tokenizer, "away")))
    program.write_text("raise SystemExit('no model')", encoding="utf-8")
    with pytest.raises(EpisodeFailedError, match="status 1: no model"):
        asyncio.run(run(Policy(tokenizer, "1")))


def test_an_agent_by_command_ends_with_a_collector_that_is_killed(
    runner: Callable[..., EpisodeRunner], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    program = f"import os, time; print(os.getpid(), file=open({str(said)!r}, 'w'), flush=True); time.sleep(1000)"

    async def run() -> None:
        async with Gateway() as gateway:
            command = (sys.executable, "-I", "-S", "-c", program)
            await runner(command=command, gateway=gateway).run(PROMPT, Policy(tokenizer, "1").ask)

    collector = os.fork()
    if collector == 0:
        try:
            asyncio.run(run())
        finally:
            os._exit(1)
    try:
        wait_until(lambda: said.exists() and said.read_text(encoding="utf-8").endswith("\n"))
        agent = psutil.Process(int(said.read_text(encoding="utf-8")))
    finally:
        os.kill(collector, signal.SIGKILL)
        os.waitpid(collector, 0)
    wait_until(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE)


def wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)
