"""An episode's turns in rows: what continues a row, what begins one, and what a row holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.data.batch import Completion, TokenKind
from pipeline.data.routed_experts import RoutedExperts
from pipeline.episodes.chat_format import ChatFormat, Message
from pipeline.episodes.rows import Context, EpisodeRows
from pipeline.tasks.tokenizer import Tokenizer
from tests.support.chat_folders import write_chat_folder

TOOL = {
    "type": "function",
    "function": {"name": "sum", "parameters": {"type": "object", "properties": {"of": {"type": "string"}}}},
}
CALL = '<tool_call>{"name": "sum", "arguments": {"of": "1", "to": 2}}</tool_call>'


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write_chat_folder(tmp_path, "qwen2.5"))


@pytest.fixture
def rows(tokenizer: Tokenizer) -> EpisodeRows:
    return EpisodeRows(ChatFormat.of(tokenizer))


class Engine:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def answer(self, text: str) -> Completion:
        tokens = self.tokenizer.encode(f"{text}<|im_end|>")
        return Completion.given(tokens, [-0.5] * len(tokens))

    def learned(self, rows: EpisodeRows) -> list[str]:
        """The texts that each row trains."""
        return [self.tokenizer.decode(row.completion.tokens[row.completion.loss_mask].tolist()) for row in rows.rows()]


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Engine:
    return Engine(tokenizer)


def user(content: Any) -> Message:
    return dict(role="user", content=content)


def said(content: str, **more: Any) -> Message:
    return dict(role="assistant", content=content, **more)


@pytest.mark.parametrize(
    "again",
    [
        said(" one\n"),
        said("one", reasoning_content=""),
        said("one", refusal=None, tool_calls=[]),
        dict(role="assistant", content=[dict(type="text", text="one")]),
    ],
)
def test_an_answer_that_says_the_same_continues_its_row(rows: EpisodeRows, engine: Engine, again: Message) -> None:
    rows.sampled(rows.context([user("a")]), engine.answer("one"))
    rows.sampled(rows.context([user([dict(type="text", text="a")]), again, user("b")]), engine.answer("two"))
    assert (engine.learned(rows), rows.branches) == (["onetwo"], {})


def test_calls_are_the_same_by_their_names_and_values(rows: EpisodeRows, engine: Engine) -> None:
    message = rows.sampled(rows.context([user("a")], [TOOL]), engine.answer(CALL))
    assert message["tool_calls"][0]["function"] == {"name": "sum", "arguments": '{"of": "1", "to": 2}'}

    def called(arguments: Any) -> list[Message]:
        call = {"id": "x", "type": "function", "function": {"name": "sum", "arguments": arguments}}
        told = dict(role="tool", tool_call_id="x", content="3")
        return [user("a"), dict(role="assistant", content=None, tool_calls=[call]), told]

    rows.sampled(rows.context(called('{"to":2,"of":"1"}'), [TOOL]), engine.answer("three"))
    assert rows.branches == {}
    rows.sampled(rows.context(called({"of": "1", "to": 3}), [TOOL]), engine.answer("four"))
    assert rows.branches == {"rewritten": 1}


def both(rows: EpisodeRows) -> tuple[int, int, int]:
    """Whence the second row branches, after how many tokens, and how many are before its first turn."""
    second = rows.rows()[1]
    return second.branch_of, second.branched_at, len(second.prompt)


def test_a_request_asked_again_repeats_all_of_it(rows: EpisodeRows, engine: Engine) -> None:
    for text in ("one", "two"):
        context = rows.context([user("a")])
        rows.sampled(context, engine.answer(text))
    assert (engine.learned(rows), rows.branches) == (["one", "two"], {"resampled": 1})
    assert both(rows) == (0, len(context.tokens), len(context.tokens))
    rows.sampled(rows.context([user("a"), said("one"), user("b")]), engine.answer("three"))
    assert engine.learned(rows) == ["onethree", "two"]


def test_of_equal_answers_the_newest_is_continued(rows: EpisodeRows, engine: Engine) -> None:
    for _ in range(2):
        rows.sampled(rows.context([user("a")]), engine.answer("one"))
    rows.sampled(rows.context([user("a"), said("one"), user("b")]), engine.answer("two"))
    assert engine.learned(rows) == ["one", "onetwo"]


def test_a_fork_repeats_the_turns_before_it(rows: EpisodeRows, engine: Engine, tokenizer: Tokenizer) -> None:
    rows.sampled(rows.context([user("a")]), engine.answer("one"))
    for other in ("b", "c"):
        rows.sampled(rows.context([user("a"), said("one"), user(other)]), engine.answer(f"to {other}"))
    assert (engine.learned(rows), rows.branches) == (["oneto b", "to c"], {"rewritten": 1})
    first, second = rows.rows()
    shared = [*first.prompt, *engine.answer("one").tokens.tolist(), *tokenizer.encode("\n<|im_start|>user\n")]
    assert (list(second.prompt[: len(shared)]), both(rows)[:2]) == (shared, (0, len(shared)))


def test_compaction_and_sub_agents(rows: EpisodeRows, engine: Engine) -> None:
    system: Message = dict(role="system", content="be brief")
    rows.sampled(rows.context([system, user("a")]), engine.answer("one"))
    rows.sampled(rows.context([system, user("so far: a, one")]), engine.answer("two"))
    rows.sampled(rows.context([user("find x")]), engine.answer("three"))
    assert (engine.learned(rows), rows.branches) == (["one", "two", "three"], {"rewritten": 1, "sub-agent": 1})
    assert [row.branch_of for row in rows.rows()] == [-1, 0, -1]
    assert rows.rows()[2].branched_at == 0


def test_other_tools_begin_a_row_with_the_turns_as_they_were(
    rows: EpisodeRows, engine: Engine, tokenizer: Tokenizer
) -> None:
    half = Completion.given(tokenizer.encode("日")[:2], [-0.5] * 2)
    rows.sampled(rows.context([user("a")], [TOOL]), half)
    context = rows.context([user("a"), said("\ufffd"), user("b")])
    rows.sampled(context, engine.answer("two"))
    assert rows.branches == {"rewritten": 1}
    assert bytes(half.tokens) in bytes(np.array(context.tokens, np.int32))
    assert TokenKind.REPEATED in context.kinds


def test_a_history_without_its_beginning_repeats_turns_by_their_tokens(
    rows: EpisodeRows, engine: Engine, tokenizer: Tokenizer
) -> None:
    half = Completion.given(tokenizer.encode("日")[:2], [-0.5] * 2)
    rows.sampled(rows.context([user("a")]), engine.answer("one"))
    rows.sampled(rows.context([user("a"), said("one"), user("b")]), half)
    context = rows.context([user("b"), said("\ufffd"), user("c")])
    rows.sampled(context, engine.answer("three"))
    assert bytes(half.tokens) in bytes(np.array(context.tokens, np.int32))
    assert np.count_nonzero(context.kinds == TokenKind.REPEATED) == len(half.tokens)
    assert (len(rows.rows()), rows.branches) == (2, {"rewritten": 1})
    again = rows.context([user("b"), said("\ufffd"), user("other")])
    assert again.tokens[: len(context.tokens) // 2] == context.tokens[: len(context.tokens) // 2]


def test_answers_to_one_context_and_to_an_old_one(rows: EpisodeRows, engine: Engine) -> None:
    """As requests of one agent at once end in any order, each gets a row that holds what was asked."""
    rows.sampled(rows.context([user("a")]), engine.answer("one"))
    contexts: list[Context] = [rows.context([user("a"), said("one"), user(text)]) for text in ("b", "b", "c")]
    for context, text in zip(contexts, ("two", "three", "four"), strict=True):
        rows.sampled(context, engine.answer(text))
    assert engine.learned(rows) == ["onetwo", "three", "four"]
    assert rows.branches == {"resampled": 1, "rewritten": 1}
    for row, context in zip(rows.rows()[1:], contexts[1:], strict=True):
        assert row.prompt == context.tokens


def test_tokens_of_an_answer_that_no_engine_sampled_are_the_templates(rows: EpisodeRows, engine: Engine) -> None:
    answer = engine.answer("abc")
    mask = np.array([True, False, True, True])
    rows.sampled(rows.context([user("a")]), replace(answer, loss_mask=mask))
    [row] = rows.rows()
    assert row.completion.kinds is not None
    assert row.completion.kinds.tolist() == [TokenKind.SAMPLED, TokenKind.TEMPLATE, *[TokenKind.SAMPLED] * 2]


def test_a_row_has_the_routes_of_its_prompt_and_all_turns(rows: EpisodeRows, engine: Engine) -> None:
    """The routes of turn n say n. What stands between two turns was first read in the request of the second."""
    messages: list[Message] = [user("a")]
    lengths = []
    for n in (1, 2, 3):
        context, answer = rows.context(messages), engine.answer("x")
        total = len(context.tokens) + len(answer.tokens)
        known = np.arange(total) < total - 1
        ids = np.where(known, n, 0).astype(np.uint8)[:, None, None]
        experts = RoutedExperts(ids=ids, known=known)
        messages += [rows.sampled(context, replace(answer, experts=experts)), user("b")]
        lengths.append(total)
    [row] = rows.rows()
    assert row.completion.experts is not None
    expected = [1] * (lengths[0] - 1) + [2] * (lengths[1] - lengths[0]) + [3] * (lengths[2] - lengths[1]) + [0]
    assert row.completion.experts.ids[:, 0, 0].tolist() == expected
    assert len(expected) == len(row.prompt) + len(row.completion.tokens)


def test_malformed_calls_are_counted(rows: EpisodeRows, engine: Engine) -> None:
    message = rows.sampled(rows.context([user("a")]), engine.answer("<tool_call>{</tool_call>"))
    assert (message["content"], rows.malformed_calls, rows.turns) == ("<tool_call>{</tool_call>", 1, 1)


def test_ids_of_calls_are_unique_in_an_episode(rows: EpisodeRows, engine: Engine) -> None:
    ids = [
        call["id"]
        for _ in range(2)
        for call in rows.sampled(rows.context([user("a")]), engine.answer(CALL * 2))["tool_calls"]
    ]
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([dict(content="a")], "expected a role and a content of text"),
        ([user([dict(type="image_url", image_url="x")])], "expected a role and a content of text"),
        ([user(3)], "expected a role and a content of text"),
        ([said("", tool_calls=[dict(id="x")])], "expected each with function: name and arguments"),
        ([said("", tool_calls=[dict(function=dict(name=1, arguments={}))])], "expected each with function"),
        ([user("\ud800")], "expected JSON in UTF-8"),
        ([], "the chat template failed"),
    ],
)
def test_messages_that_are_refused(rows: EpisodeRows, messages: Sequence[Message], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        rows.context(messages)
    assert rows.rows() == ()
