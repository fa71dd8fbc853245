"""Formats of conversations: what stands between turns, and what an answer means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.batch import Completion, TokenKind
from pipeline.episodes.chat_format import ChatFormat, Message
from pipeline.episodes.rows import EpisodeRows
from pipeline.errors import ModelError
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer
from tests.support.chat_folders import FAMILIES, QWEN3, QWEN25, write_chat_folder

SUM = {
    "type": "function",
    "function": {"name": "sum", "parameters": {"type": "object", "properties": {"of": {"type": "string"}}}},
}
PYTHON = {
    "type": "function",
    "function": {"name": "python", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}},
}
THINKS_AT_ONCE = QWEN3.replace(
    r"{{- '<|im_start|>assistant\n' }}" + "\n{%- if enable",
    r"{{- '<|im_start|>assistant\n<think>\n' }}" + "\n{%- if enable",
)


def format_of(folder: Path, family: str, template: str | None = None, **arguments: Any) -> tuple[Tokenizer, ChatFormat]:
    write_chat_folder(folder, family, template)
    tokenizer = Tokenizer.load(folder, template_arguments=arguments)
    return tokenizer, ChatFormat.of(tokenizer)


class Talk:
    """A conversation whose turns are given as texts. `given` is what the engine was last asked to continue."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat, tools: Sequence[dict[str, Any]] = ()) -> None:
        self.tokenizer, self.tools = tokenizer, tools
        self.rows = EpisodeRows(chat)
        self.history: list[Message] = []
        self.given = ""

    def say(self, answer: str, *messages: Message) -> Message:
        self.history += messages
        context = self.rows.context(self.history, self.tools)
        self.given = self.tokenizer.decode(context.tokens, special=True)
        tokens = self.tokenizer.encode(answer)
        self.history.append(self.rows.sampled(context, Completion.given(tokens, [-0.5] * len(tokens))))
        return self.history[-1]


def user(content: str) -> Message:
    return dict(role="user", content=content)


def told(content: str) -> Message:
    return dict(role="tool", tool_call_id="call00000", content=content)


CALL = '{"name": "sum", "arguments": {"of": "6 é"}}'
ANSWERS = {
    "qwen3": (
        f"<think>\nI add.\n</think>\n\nWell.\n<tool_call>\n{CALL}\n</tool_call><|im_end|>",
        "<think>\nDone.\n</think>\n\nIt is 42.<|im_end|>",
    ),
    "qwen2.5": (f"Well.\n<tool_call>\n{CALL}\n</tool_call><|im_end|>", "It is 42.<|im_end|>"),
    "llama3": (f"{CALL.replace('arguments', 'parameters')}<|eot_id|>", "It is 42.<|eot_id|>"),
    "characters": ("well!6 é<|end|>", "it is 42<|end|>"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_where_answers_are_the_templates_own_engines_read_what_the_template_writes(tmp_path: Path, family: str) -> None:
    tokenizer, chat = format_of(tmp_path, family)
    talk = Talk(tokenizer, chat, [SUM])
    calls, says = ANSWERS[family]
    system: Message = dict(role="system", content="be brief")
    follows = [
        (calls, [system, user("what is 40 + 2")]),
        (calls, [told("41")]),
        (says, [told(" 42 ")]),
        (calls, [user("again")]),
        (says, [told("<b>")]),
    ]
    for answer, messages in follows:
        talk.say(answer, *messages)
        asked = [
            {
                **message,
                "tool_calls": [
                    {**call, "function": {"name": "sum", "arguments": json.loads(call["function"]["arguments"])}}
                    for call in message.get("tool_calls", ())
                ],
            }
            for message in talk.history[:-1]
        ]
        if family == "characters":
            written = "".join(
                {"system": "#", "user": ">", "assistant": ":", "tool": "<"}[m["role"]]
                + (m["content"] + "!6 é" * bool(m["tool_calls"]) + "<|end|>")
                for m in asked
            )
            assert talk.given == f"{written}:"
        else:
            assert talk.given == tokenizer.conversation(asked, tools=[SUM])
    assert talk.rows.branches == ({"thinking stripped": 1} if family == "qwen3" else {})


@pytest.mark.parametrize(
    ("family", "between"),
    [
        ("qwen3", "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        ("qwen2.5", "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        (
            "llama3",
            '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("characters", "<42<|end|>:"),
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_a_turn_that_was_cut_is_ended_by_the_template(tmp_path: Path, family: str, between: str, ended: bool) -> None:
    tokenizer, chat = format_of(tmp_path, family)
    talk = Talk(tokenizer, chat)
    end = tokenizer.eos_token
    talk.say("so be " + end * ended, user("go"))
    talk.say("ok", told("42"))
    assert talk.given.endswith("so be " + end + between)
    assert len(talk.rows.rows()) == 1


def test_kinds_say_who_wrote_each_token(tmp_path: Path) -> None:
    tokenizer, chat = format_of(tmp_path, "llama3")
    talk = Talk(tokenizer, chat, [SUM])
    talk.say(ANSWERS["llama3"][0], user("go"))
    talk.say("It.<|eot_id|>", told(' a "b"\n'), user("  yes  "), dict(role="system", content="hm"))
    [row] = talk.rows.rows()
    assert row.completion.kinds is not None
    pieces = tokenizer.pieces(row.completion.tokens.tolist())
    found: list[tuple[TokenKind, str]] = []
    for piece, kind in zip(pieces, map(TokenKind, row.completion.kinds.tolist()), strict=True):
        if found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + piece)
        else:
            found.append((kind, piece))

    def header(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    assert found == [
        (TokenKind.SAMPLED, ANSWERS["llama3"][0]),
        (TokenKind.TEMPLATE, header("ipython") + '"'),
        (TokenKind.TOOL, r" a \"b\"\n"),
        (TokenKind.TEMPLATE, '"<|eot_id|>' + header("user")),
        (TokenKind.USER, "yes"),
        (TokenKind.TEMPLATE, "<|eot_id|>" + header("system")),
        (TokenKind.SYSTEM, "hm"),
        (TokenKind.TEMPLATE, "<|eot_id|>" + header("assistant")),
        (TokenKind.SAMPLED, "It.<|eot_id|>"),
    ]


def test_calls_that_the_template_refuses_stay_as_they_were_sampled(tmp_path: Path) -> None:
    """Llama's template writes only one call of a message; its models sample several."""
    tokenizer, chat = format_of(tmp_path, "llama3")
    talk = Talk(tokenizer, chat, [SUM])
    calls = '{"name": "sum", "parameters": {"of": "1"}}'
    talk.say(f"{calls}; {calls}<|eot_id|>", user("go"))
    talk.say("It.<|eot_id|>", told("1"), told("1"))
    talk.history[0] = user("go on")
    talk.say("It.<|eot_id|>", user("and?"))
    assert f"go on<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{calls}; {calls}<|eot_id|>" in talk.given


def test_another_end_than_the_templates_stays(tmp_path: Path) -> None:
    tokenizer, chat = format_of(tmp_path, "llama3")
    assert [tokenizer.decode([end], special=True) for end in chat.stop_tokens] == [
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
    ]
    talk = Talk(tokenizer, chat)
    talk.say("<|python_tag|>1 + 1<|eom_id|>", user("go"))
    talk.say("2", told("2"))
    assert "1 + 1<|eom_id|><|start_header_id|>ipython" in talk.given


def test_thinking_that_the_template_removes_begins_a_row(tmp_path: Path) -> None:
    tokenizer, chat = format_of(tmp_path, "qwen3")
    assert not chat.is_append_only
    assert chat.why_not == "it removes the thinking of earlier turns when a user's message follows"
    talk = Talk(tokenizer, chat)
    talk.say("<think>\nHm\n</think>\n\nOne ü.<|im_end|>", user("a"))
    talk.say("<think>\nHmm\n</think>\n\nTwo.<|im_end|>", told("b"))
    assert (len(talk.rows.rows()), talk.rows.branches) == (1, {})
    talk.say("Three.<|im_end|>", user("c"))
    talk.say("Four.<|im_end|>", user("d"))
    first, second = talk.rows.rows()
    assert tokenizer.decode(second.prompt, special=True) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nOne ü.<|im_end|>\n<|im_start|>user\n<tool_response>\nb\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (second.branch_of, second.branched_at) == (0, len(first.prompt))
    assert talk.rows.branches == {"thinking stripped": 1}


def test_without_thinking_the_empty_one_of_each_request_stays(tmp_path: Path) -> None:
    tokenizer, chat = format_of(tmp_path, "qwen3", enable_thinking=False)
    talk = Talk(tokenizer, chat)
    talk.say("One.<|im_end|>", user("a"))
    talk.say("Two.<|im_end|>", user("b"))
    asked = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert talk.given == (
        f"<|im_start|>user\na<|im_end|>\n{asked}One.<|im_end|>\n<|im_start|>user\nb<|im_end|>\n{asked}"
    )
    assert len(talk.rows.rows()) == 1


def test_a_request_that_begins_the_thinking(tmp_path: Path) -> None:
    """The turns of the last question keep their thinking, and what opened it, also in a row of their own."""
    tokenizer, chat = format_of(tmp_path, "qwen3", THINKS_AT_ONCE)
    talk = Talk(tokenizer, chat)
    message = talk.say("Hm\n</think>\n\nOne.<|im_end|>", user("a"))
    assert message == dict(role="assistant", content="One.", reasoning_content="Hm")
    assert chat.parse(tokenizer.encode("<think>\nHm")).message == dict(
        role="assistant", content="", reasoning_content="Hm"
    )
    talk.say("Hmm\n</think>\n\nTwo.<|im_end|>", user("b"))
    opened = "<|im_start|>assistant\n<think>\n"
    begin = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nOne.<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
    assert talk.given == f"{begin}{opened}"
    talk.tools = [SUM]  # with other tools, the system's message is another
    talk.say("ok", told("c"))
    assert talk.given.endswith(
        f"{begin}{opened}Hmm\n</think>\n\nTwo.<|im_end|>\n<|im_start|>user\n<tool_response>\nc\n</tool_response>"
        f"<|im_end|>\n{opened}"
    )
    assert talk.rows.branches == {"thinking stripped": 1, "rewritten": 1}


def test_a_token_over_the_border_of_thinking_is_encoded_again(tmp_path: Path) -> None:
    tokenizer, chat = format_of(tmp_path, "qwen3")
    talk = Talk(tokenizer, chat)
    assert " the" in tokenizer.pieces(tokenizer.encode(" the"))
    talk.say("<think>x</think> the end<|im_end|>", user("a"))
    context = talk.rows.context([*talk.history, user("b")])
    assert tokenizer.decode(context.tokens, special=True) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nthe end<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_halves_of_characters_stay_halves(tmp_path: Path) -> None:
    tokenizer, chat = format_of(tmp_path, "qwen2.5")
    rows = EpisodeRows(chat)
    half = tokenizer.encode("日")[:2]
    context = rows.context([user("a")])
    message = rows.sampled(context, Completion.given(half, [-0.5] * 2))
    assert message["content"] == "\ufffd"
    more = rows.context([user("a"), message, user("日")])
    assert more.tokens[: len(context.tokens) + 2] == (*context.tokens, *half)
    assert rows.branches == {}


CASES = [
    ("qwen2.5", f"Well. <tool_call>\n{CALL}\n</tool_call>\n", "Well.", [("sum", {"of": "6 é"})], 0),
    (
        "qwen2.5",
        f"<tool_call>{CALL}</tool_call> and <tool_call>{CALL}</tool_call>",
        "and",
        [("sum", {"of": "6 é"})] * 2,
        0,
    ),
    (
        "qwen2.5",
        '<tool_call>{"name": "sum", "arguments": {"of": "</tool_call>"}}</tool_call>',
        "",
        [("sum", {"of": "</tool_call>"})],
        0,
    ),
    ("qwen2.5", '<tool_call>{"name": "sum", "arguments": "{\\"of\\": 1}"}</tool_call>', "", [("sum", {"of": 1})], 0),
    ("qwen2.5", f"<tool_call>\n{CALL}", f"<tool_call>\n{CALL}", [], 1),
    ("qwen2.5", "<tool_call>{sum}</tool_call>", "<tool_call>{sum}</tool_call>", [], 1),
    (
        "qwen2.5",
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        [],
        1,
    ),
    (
        "qwen2.5",
        '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
        [],
        1,
    ),
    ("qwen2.5", '<tool_call>{"name": "\\ud800"}</tool_call>', '<tool_call>{"name": "\\ud800"}</tool_call>', [], 1),
    (
        "qwen2.5",
        f"<tool_call>{{}}</tool_call><tool_call>{CALL}</tool_call>",
        "<tool_call>{}</tool_call>",
        [("sum", {"of": "6 é"})],
        1,
    ),
    ("qwen2.5", "<tool_call>" + '{"name": "a", "arguments": {"x": ' + "[" * 9999, None, [], 1),
    ("qwen3", f"<think>\n<tool_call>{CALL}</tool_call>\n</think>\n\nNo.", "No.", [], 0),
    ("qwen3", f"<think>\n<tool_call>{CALL}</tool_call>", "", [], 0),
    ("qwen3", "One </think> is not thinking", "One </think> is not thinking", [], 0),
    ("llama3", ' {"name": "sum", "parameters": {"of": 1}}', "", [("sum", {"of": 1})], 0),
    ("llama3", '{"name": "sum", "parameters": {}}; {"name": "a"}', "", [("sum", {}), ("a", {})], 0),
    ("llama3", 'Hm.<|python_tag|>{"name": "sum", "parameters": {"of": 1}}', "Hm.", [("sum", {"of": 1})], 0),
    ("llama3", "<|python_tag|>print('a')\n", "", [("python", {"code": "print('a')"})], 0),
    ("llama3", '{"name": "sum", "parameters": {}} is a call', '{"name": "sum", "parameters": {}} is a call', [], 1),
    ("llama3", '{"answer": 42}', '{"answer": 42}', [], 0),
    ("llama3", '<|python_tag|>{"name": ', '<|python_tag|>{"name":', [], 1),
    ("characters", "so!6*7", "so", [("sum", {"of": "6*7"})], 0),
    ("characters", "!python 6*7!1", "", [("python", {"code": "6*7"}), ("sum", {"of": "1"})], 0),
    ("characters", "so!", "so!", [], 1),
]


@pytest.mark.parametrize(("family", "answer", "content", "calls", "malformed"), CASES)
def test_answers(
    tmp_path: Path, family: str, answer: str, content: str | None, calls: list[tuple[str, Any]], malformed: int
) -> None:
    tokenizer, chat = format_of(tmp_path, family)
    message, bad = chat.parse([*tokenizer.encode(answer), chat.stop_tokens[0]], [SUM, PYTHON], turn=3)
    assert (message["content"], bad) == (answer if content is None else content, malformed)
    functions = [call["function"] for call in message.get("tool_calls", ())]
    assert [(f["name"], json.loads(f["arguments"])) for f in functions] == calls
    assert [call["id"] for call in message.get("tool_calls", ())] == [f"call003{n:02}" for n in range(len(calls))]


def test_without_tools_characters_are_text(tmp_path: Path) -> None:
    tokenizer, chat = format_of(tmp_path, "characters")
    assert chat.parse(tokenizer.encode("so!6")).message == dict(role="assistant", content="so!6")


MOVES_TOOLS = (
    "{%- for message in messages %}{%- if loop.last and tools %}<tools>{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    """{%- for call in message.tool_calls or [] %}{{- '[{"name": "' + call.function.name + '", "arguments": ' }}"""
    "{{- call.function.arguments | tojson }}{{- '}]' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def test_a_template_that_moves_what_it_wrote(tmp_path: Path) -> None:
    tokenizer, chat = format_of(tmp_path, "qwen2.5", MOVES_TOOLS)
    assert chat.why_no_tools == ""
    assert chat.why_not == (
        "it writes earlier messages otherwise when a user's message follows; it writes earlier messages otherwise when "
        "a tool's answer follows"
    )
    talk = Talk(tokenizer, chat, [SUM])
    talk.say("One.<|im_end|>", user("a"))
    talk.say("Two.<|im_end|>", user("b"))
    assert talk.given == tokenizer.conversation(talk.history[:-1], tools=[SUM])
    assert talk.rows.branches == {"rewritten": 1}
    assert chat.parse(tokenizer.encode(f"Hm [{CALL}, {CALL}]")).message["content"] == "Hm"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            QWEN25.replace('{"name": "', "<function=").replace('", "arguments": ', ">"),
            "the chat template writes no tool call as a JSON object with a name and its arguments",
        ),
        (
            QWEN25.replace("'\\n<tool_response>\\n' + message.content", "'\\n<tool_response>\\n'"),
            "leaves out what a tool answers",
        ),
        (QWEN25, ""),
        (
            QWEN25
            + "{%- for message in messages if message.role == 'tool' %}{{- raise_exception('no tools') }}{%- endfor %}",
            "no tools",
        ),
    ],
)
def test_a_format_without_tools_says_so(tmp_path: Path, template: str, why: str) -> None:
    _, chat = format_of(tmp_path, "qwen2.5", template)
    assert why in chat.why_no_tools
    assert bool(chat.why_no_tools) == bool(why)


def test_folders_that_no_conversation_can_be_written_for(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not write what the assistant says"):
        format_of(tmp_path / "silent", "qwen2.5", "{{- 'Hello' }}")
    write_character_tokenizer(tmp_path / "few", "0123456789=")
    with pytest.raises(ModelError, match="'#' has no token"):
        ChatFormat.of(Tokenizer.load(tmp_path / "few"))
