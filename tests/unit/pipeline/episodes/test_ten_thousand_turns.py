"""10,000 random turns over four formats: what is trained is what engines sampled, behind what they were given.

An agent answers, calls tools, forgets thinking, compacts and rewrites its history, asks again, forks and has
sub-agents. An engine samples words, calls, broken calls, thinking and random tokens, such as halves of characters. It
numbers its tokens by their log-probabilities, so that each can be found in the rows.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.data.batch import Completion, KeptSets, Row, TokenKind
from pipeline.episodes.chat_format import ChatFormat, Message
from pipeline.episodes.rows import EpisodeRows
from pipeline.tasks.tokenizer import Tokenizer
from tests.support.chat_folders import CHARACTERS, FAMILIES, write_chat_folder

TURNS, EVERYDAY = 2_500, 500
"""Of each format: 10,000 of the four in all."""
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}},
    }
    for name in ("search", "sum")
]
WORDS = ("the", "sum", "is", "né", "→", "日本", "👩‍🚀", "\n\n", "<b>", "thinking", "x = {}", "42.", " ", "ﬁ")


@dataclass
class Call:
    """A request to the engine, and its answer."""

    given: tuple[int, ...]
    answer: list[int]
    first: int
    """Number of its first token."""
    version: int


@dataclass
class Engine:
    tokenizer: Tokenizer
    chat: ChatFormat
    rng: random.Random
    calls: list[Call] = field(default_factory=list)
    sampled: int = 0

    def words(self) -> str:
        if not self.tokenizer.has_template:
            return "".join(self.rng.choices(CHARACTERS, k=self.rng.randint(1, 9)))
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, 6)))

    def answer(self) -> list[int]:
        rng, tokenizer = self.rng, self.tokenizer
        if rng.random() < 0.2:
            known = [i for i in range(tokenizer.vocab_size) if i not in self.chat.stop_tokens]
            tokens = rng.choices(known, k=rng.randint(1, 12))
        else:
            tokens = tokenizer.encode(self.text())
        return tokens + ([rng.choice(self.chat.stop_tokens)] if rng.random() < 0.85 or not tokens else [])

    def text(self) -> str:
        rng = self.rng
        calls = [
            json.dumps(
                {"name": rng.choice(("search", "sum")), "arguments": {"query": self.words()}}, ensure_ascii=False
            )
            for _ in range(rng.choice((0, 0, 1, 1, 2)))
        ]
        if calls and rng.random() < 0.15:
            calls[-1] = calls[-1][:-2]
        if not self.tokenizer.has_template:
            return self.words().replace("!", "") + "".join(f"!{rng.choice(('', 'sum '))}{len(c)}" for c in calls)
        words = self.words()
        if "<tool_call>" in self.tokenizer.vocabulary:
            words += "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)
        elif calls:
            words = rng.choice(("", "<|python_tag|>")) + ";".join(calls)
        if self.chat.why_not and rng.random() < 0.7:
            words = f"<think>\n{self.words()}" + ("\n</think>\n\n" + words if rng.random() < 0.9 else "")
        return words

    def complete(self, given: tuple[int, ...]) -> Completion:
        answer = self.answer()
        call = Call(given, answer, self.sampled + 1, len(self.calls) // 50)
        self.calls.append(call)
        self.sampled += len(answer)
        numbers = np.arange(call.first, call.first + len(answer))
        return replace(
            Completion.given(answer, -numbers.astype(np.float32), version=call.version),
            kept=KeptSets.of([[token] for token in answer]),
            finish="stop" if answer[-1] in self.chat.stop_tokens else "length",
        )


@dataclass
class Agent:
    engine: Engine
    rows: EpisodeRows
    rng: random.Random
    history: list[Message] = field(default_factory=list)
    tools: Sequence[dict[str, Any]] = ()
    past: list[list[Message]] = field(default_factory=list)
    forgets_thinking: bool = False

    def turn(self) -> None:
        context = self.rows.context(self.history, self.tools)
        completion = self.engine.complete(context.tokens)
        self.past.append([*self.history])
        self.history.append(self.as_sent(self.rows.sampled(context, completion)))

    def as_sent(self, message: Message) -> Message:
        """The message as an agent's library may send it again."""
        message = {**message}
        if self.forgets_thinking:
            message.pop("reasoning_content", None)
        if "tool_calls" in message and self.rng.random() < 0.5:
            function = message["tool_calls"][0]["function"]
            again = json.dumps(json.loads(function["arguments"]), indent=1)
            message["tool_calls"] = [
                {**message["tool_calls"][0], "id": "other", "function": {**function, "arguments": again}},
                *message["tool_calls"][1:],
            ]
        return message

    def go_on(self) -> None:
        rng, last = self.rng, self.history[-1] if self.history else {}
        what = rng.random()
        if last.get("role") != "assistant":
            return
        if what < 0.04:  # compaction
            self.history = [*self.history[:1], self.user()]
        elif what < 0.08:  # a changed message
            place = rng.choice([n for n, message in enumerate(self.history) if message["role"] == "user"])
            self.history = [*self.history[:place], self.user()]
        elif what < 0.12:  # the same request again, or a fork
            self.history = [*rng.choice(self.past)]
        elif what < 0.14:  # a history without its beginning
            self.history = [self.user(), *self.history[-3:], self.user()]
        elif what < 0.17:  # a sub-agent
            self.history = [dict(role="system", content=self.engine.words()), self.user()]
        elif what < 0.19:
            self.tools = rng.choice(((), TOOLS, TOOLS[:1]))
            self.history.append(self.user())
        elif calls := last.get("tool_calls"):
            self.history += [dict(role="tool", tool_call_id=c["id"], content=self.engine.words()) for c in calls]
        else:
            self.history.append(self.user())

    def user(self) -> Message:
        text = self.engine.words()
        return dict(role="user", content=text if self.rng.random() < 0.8 else [dict(type="text", text=text)])


def episode(engine: Engine, rng: random.Random, turns: int) -> tuple[EpisodeRows, list[Call]]:
    begun = len(engine.calls)
    agent = Agent(engine, EpisodeRows(engine.chat), rng, tools=TOOLS, forgets_thinking=rng.random() < 0.3)
    agent.history = [dict(role="system", content="be brief")] * (rng.random() < 0.5) + [agent.user()]
    for _ in range(turns):
        agent.turn()
        agent.go_on()
    return agent.rows, engine.calls[begun:]


def trained(row: Row) -> list[tuple[int, int, int]]:
    """Number, place in the row and version of each token that is learned."""
    completion = row.completion
    places = np.flatnonzero(completion.loss_mask)
    return [
        (round(-float(completion.logprobs[at])), len(row.prompt) + int(at), int(completion.versions[at]))
        for at in places
    ]


@pytest.mark.parametrize("most", [EVERYDAY, pytest.param(TURNS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained_was_sampled_behind_what_was_given(tmp_path: Path, family: str, most: int) -> None:
    tokenizer = Tokenizer.load(write_chat_folder(tmp_path, family))
    rng = random.Random(f"turns of {family}")
    engine = Engine(tokenizer, ChatFormat.of(tokenizer), rng)
    reasons: Counter[str] = Counter()
    differences, kinds = 0, Counter[int]()
    while len(engine.calls) < most:
        rows, calls = episode(engine, rng, min(rng.randint(1, 16), most - len(engine.calls)))
        numbered = {call.first + n: (call, n) for call in calls for n in range(len(call.answer))}
        turns = Counter[int]()
        recorded = rows.rows()
        for row in recorded:
            whole, completion = [*row.prompt, *completion_tokens(row)], row.completion
            assert completion.kinds is not None
            assert completion.kept is not None
            np.testing.assert_array_equal(completion.loss_mask, completion.kinds == TokenKind.SAMPLED)
            assert completion.loss_mask[0]
            assert completion.loss_mask[-1]
            assert not completion.logprobs[~completion.loss_mask].any()
            given = np.flatnonzero(~completion.loss_mask)
            np.testing.assert_array_equal(completion.versions[given], completion.versions[given - 1])
            completion.kept.check(completion.tokens, completion.loss_mask)
            for number, at, version in trained(row):
                call, place = numbered.pop(number)  # a token that is trained twice is gone
                differences += whole[at] != call.answer[place] or version != call.version
                if place == 0:
                    turns[call.first] += 1
                    differences += tuple(whole[:at]) != call.given
            if row.branch_of >= 0:
                parent = recorded[row.branch_of]
                both = [*parent.prompt, *completion_tokens(parent)]
                assert whole[: row.branched_at] == both[: row.branched_at]
                assert row.branched_at <= len(row.prompt)
            kinds.update(completion.kinds.tolist())
        assert not numbered  # all tokens are trained
        assert list(turns.values()) == [1] * len(calls) == [1] * rows.turns
        assert rows.branches.total() == len(recorded) - 1
        reasons += rows.branches
    assert differences == 0
    assert len(engine.calls) == most
    assert set(reasons) == {"rewritten", "resampled", "sub-agent"} | (
        {"thinking stripped"} if family == "qwen3" else set()
    )
    assert {TokenKind.SAMPLED, TokenKind.TEMPLATE, TokenKind.USER, TokenKind.TOOL} <= set(kinds)


def completion_tokens(row: Row) -> list[int]:
    return row.completion.tokens.tolist()
