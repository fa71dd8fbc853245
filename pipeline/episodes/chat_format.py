"""Write conversations as tokens, and read answers, by the chat template of a model's folder.

    messages ──template, a mark in place of each sampled turn──▶ text ──split at the marks──▶ piece · piece · piece
                                                                                                │       │       │
    tokens                                                                                   encoded TURN encoded TURN …

No sampled token is ever made from text again. What a template writes in front of a turn and behind it is found by
having it write the conversation with marks, so that nothing here knows a family's headers. Whether the tokens of a
conversation can stay as they are when messages follow is found in the same way: many templates remove the
thinking of earlier turns once the user speaks again.

A folder without a chat template, such as that of a character tokenizer, gets the plainest of formats, in which a
message is a character for its role, its text and the end-of-sequence token, and a call is the text behind a `!`:

    >6*7 is what?<|end|>:!6*7<|end|><42<|end|>:42<|end|>      user, assistant (a call), tool, assistant
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batch import TokenKind
from pipeline.demonstrations import named_ends
from pipeline.errors import ModelError
from pipeline.tasks.tokenizer import Tokenizer, unused_mark
from precision.text import one_line, quoted

Message = dict[str, Any]
"""A message in OpenAI's form: role, content, and what else belongs to it (tool_calls, tool_call_id, name,
reasoning_content)."""
Tool = Mapping[str, Any]
"""A tool in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters": JSON schema}}."""
CutReason = Literal["", "thinking stripped", "rewritten"]
ROLE_CHARACTERS = {"system": "#", "user": ">", "assistant": ":", "tool": "<"}
CALL_CHARACTER = "!"
"""What the format of a folder without a template needs in the vocabulary, besides the texts."""

_CUTS = {
    "thinking stripped": "it removes the thinking of earlier turns",
    "rewritten": "it writes earlier messages otherwise",
}
_KINDS = {"system": TokenKind.SYSTEM, "user": TokenKind.USER, "tool": TokenKind.TOOL}
_THINK, _THOUGHT = "<think>", "</think>"
_NO_THOUGHTS = re.compile(r"<think>\s*</think>\s*")
_PYTHON_TAG = "<|python_tag|>"
_PYTHON = "python"
"""The tool that a call of plain code goes to."""
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class Turn:
    """A sampled turn, as tokens."""

    tokens: tuple[int, ...]
    thought: bool
    """Whether it holds thinking."""
    tools: tuple[Tool, ...] = ()
    """What it could call."""


class Written(NamedTuple):
    tokens: list[int]
    kinds: NDArray[np.uint8]
    """[tokens] TokenKind; those of an assistant's message that no engine sampled are TEMPLATE."""
    behind: int
    """The place of the turn behind which the tokens stand; -1: they are the whole conversation."""
    cut: CutReason
    """Why that is not the last turn; empty: it is, or there is none."""


class Answer(NamedTuple):
    message: Message
    malformed_calls: int
    """Tool calls that could not be read and stay in the text."""


class ChatFormat:
    """The chat format of a tokenizer's folder; create it by `ChatFormat.of`."""

    @staticmethod
    def of(tokenizer: Tokenizer) -> ChatFormat:
        """Return the format of the tokenizer's folder. Raises ModelError when the template fails on a plain
        conversation, or a format of characters lacks characters."""
        return ChatFormat(tokenizer)

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Try the template; use `of` instead."""
        self._tokenizer = tokenizer
        self._has_template = tokenizer.has_template
        if not self._has_template:
            needed = "".join(ROLE_CHARACTERS.values()) + CALL_CHARACTER
            try:
                tokenizer.encode(needed)
            except ModelError as error:
                raise ModelError(
                    f"{str(error).partition(';')[0]}; a folder without a chat template marks the messages of episodes "
                    f"by {needed}: make it with these in --characters, or give it a chat_template.jinja"
                ) from error
        self._thinks = self._has_template and _THOUGHT in tokenizer.template
        user, mark = {"role": "user", "content": "Hello."}, unused_mark("")
        silent, asked = self._text([user], to_answer=False), self._text([user])
        stub = _stub(mark, 1, Turn((), thought=False))
        head, found, tail = self._text([user, stub], to_answer=False).partition(_mark(mark, "turn", 1))
        if not found:
            raise ModelError(
                f"{tokenizer.folder}: the chat template does not write what the assistant says; correct the template"
            )
        header = _NO_THOUGHTS.sub("", head).removeprefix(_NO_THOUGHTS.sub("", silent))
        request = asked.removeprefix(silent)
        self._opening = request[request.rfind(_THINK) :] if request.rstrip().endswith(_THINK) else ""
        """What the request for an answer writes where a turn begins within its thinking."""
        end = tokenizer.encode(tail)[:1]
        self.stop_tokens = tuple(
            sorted({tokenizer.eos_token_id, *named_ends(tokenizer.folder), *tokenizer.reserved.intersection(end)})
        )
        """Ids that end an assistant's turn, ascending: those at which engines stop, and the template's."""
        self._opener, self._closer, self.why_no_tools = self._call_syntax(user, header)
        """`why_no_tools`: why conversations with tools cannot be written or read; empty: they can."""
        self.why_not = "; ".join(f"{_CUTS[cut]} when {name} follows" for name, cut in self._cuts(user) if cut)
        """Why the template writes earlier messages otherwise when more follow, for people; empty: it does not. A
        conversation goes on in a new row there."""
        self.is_append_only = not self.why_not

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        turns: Mapping[int, Turn] | None = None,
        in_place: Collection[int] = (),
    ) -> Written:
        """Return what stands behind the last turn that can stay as it is, up to the request for the assistant's answer;
        without such a turn, the whole conversation. `turns` are the sampled ones by their place in `messages`; those
        `in_place` were sampled behind the messages before them, so that they can stay. Others are repeated by their
        tokens, without thinking that the template removes. Raises ModelError for messages that the template refuses or
        that hold a character without a token."""
        turns = {} if turns is None else turns
        mark = unused_mark(json.dumps([messages, tools], ensure_ascii=False))
        stubs = {place: _stub(mark, place, turn) for place, turn in turns.items()}
        stubbed = [stubs.get(place, message) for place, message in enumerate(messages)]
        now = self._text(stubbed, tools)
        cut: CutReason = ""
        behind = -1
        for place in sorted(in_place, reverse=True):
            why = self._cut(now, stubbed[: place + 1], tools, turns, mark)
            if not why:
                behind = place
                break
            cut = cut or why
        whole = {place for place, turn in turns.items() if not turn.thought or _mark(mark, "thoughts", place) in now}
        for stub in stubs.values():
            stub.pop("reasoning_content", None)
        bare = self._text(stubbed, tools) if any(turn.thought for turn in turns.values()) else now
        hidden = [
            {**message, "content": _mark(mark, "content", place)} if message["role"] in _KINDS else message
            for place, message in enumerate(stubbed)
        ]
        later = {place: turns[place] for place in whole if place > behind}
        pieces = dict(self._pieces(bare, mark, later))
        outlines = dict(self._pieces(self._text(hidden, tools), mark, later))
        tokens, kinds = list[int](), list[NDArray[np.uint8]]()
        for place, piece in pieces.items():
            if place < behind:
                continue
            turn = turns[place].tokens if place >= 0 else ()
            if place > behind:
                turn = turn if place in whole or place < 0 else self._spoken(turn)
                tokens += turn
                kinds.append(np.full(len(turn), TokenKind.REPEATED, np.uint8))
            ids, starts = self._tokenizer.encode_at(piece)
            ended = bool(turn) and turn[-1] in self.stop_tokens and bool(ids) and ids[0] in self.stop_tokens
            tokens += ids[ended:]
            kinds.append(_kinds(piece, outlines.get(place, ""), mark, messages, starts)[ended:])
        return Written(tokens, np.concatenate(kinds), behind, cut)

    def _cut(
        self, now: str, until: Sequence[Message], tools: Sequence[Tool], turns: Mapping[int, Turn], mark: str
    ) -> CutReason:
        """Return why the tokens up to the end of the last message of `until`, a sampled turn, cannot stay in the text
        `now`; empty: they can. The empty thinking that some templates write into a request for an answer, and leave out
        of history, stays where it was sampled behind."""
        place = len(until) - 1
        if turns[place].tools != tuple(tools):
            return "rewritten"
        then = self._text(until, tools, to_answer=False)
        for number, turn in turns.items():
            thoughts = _mark(mark, "thoughts", number)
            if turn.thought and number <= place and (number == place or thoughts in then) and thoughts not in now:
                return "thinking stripped"
        here = _mark(mark, "turn", place)
        heads = [_NO_THOUGHTS.sub("", text.partition(here)[0]) for text in (now, then)]
        return "" if here in now and heads[0] == heads[1] else "rewritten"

    def readable(self, text: str) -> str:
        """Return a text without the characters that have no token."""
        try:
            self._tokenizer.encode(text)
        except ModelError:
            return "".join(character for character in text if character in self._tokenizer.vocabulary)
        return text

    def parse(self, tokens: Sequence[int], tools: Sequence[Tool] = (), turn: int = 0) -> Answer:
        """Read a sampled turn: {"role", "content", "reasoning_content" if any, "tool_calls" if any}, with arguments as
        JSON text. Ids of calls are made of the number of the turn. Bytes that make no character are U+FFFD."""
        said = tokens[:-1] if len(tokens) and tokens[-1] in self.stop_tokens else tokens
        thoughts, text = self._thoughts(self._tokenizer.decode(said, special=True))
        if not self._has_template:
            calls, content, malformed = _plain_calls(text, tools)
        elif self._opener:
            calls, content, malformed = _tagged_calls(text, self._opener, self._closer)
        else:
            calls, content, malformed = _bare_calls(text, tools)
        message: Message = {"role": "assistant", "content": content.strip()}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call{turn:03}{number:02}",  # nine letters and digits, as Mistral's template wants them
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for number, (name, arguments) in enumerate(calls)
            ]
        return Answer(message, malformed)

    def _cuts(self, user: Message) -> Iterator[tuple[str, CutReason]]:
        """Yield what may follow a turn, and why the turn cannot stay as it is then."""
        if not self._has_template:
            return  # and perhaps no characters for this conversation
        tools = () if self.why_no_tools else (_PROBE_TOOL,)
        turns = {1: Turn((), self._thinks, tools)}
        told: Message = {"role": "tool", "tool_call_id": "call00000", "content": "Yes."}
        said: Message = {"role": "assistant", "content": "Yes."}
        for name, message in (("a user's message", user), *([("a tool's answer", told)] if tools else [])):
            yield name, self.write([user, said, message], tools, turns, in_place=(1,)).cut

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), to_answer: bool = True) -> str:
        if self._has_template:
            return self._tokenizer.conversation(messages, tools=tools, to_answer=to_answer)
        end = self._tokenizer.eos_token
        written = [f"{ROLE_CHARACTERS.get(m['role'], '')}{m['content']}{_called(m, tools)}{end}" for m in messages]
        if unknown := next((m["role"] for m in messages if m["role"] not in ROLE_CHARACTERS), None):
            raise ModelError(
                f"role {quoted(unknown)} has no character; use the roles {', '.join(ROLE_CHARACTERS)}, or a folder "
                "with a chat template"
            )
        return "".join(written) + ROLE_CHARACTERS["assistant"] * to_answer

    def _pieces(self, text: str, mark: str, whole: Mapping[int, Turn]) -> Iterator[tuple[int, str]]:
        """Yield the place of each sampled turn in `text`, and what the template writes behind it; first -1 and what
        stands before all turns. In front of the `whole` ones, which bring their thinking, there is none of its own."""
        for place, turn in whole.items():
            here = _mark(mark, "turn", place)
            thinks = turn.thought or _THOUGHT in self._tokenizer.decode(turn.tokens, special=True)
            if thinks and here in text:
                head, _, tail = text.partition(here)
                text = "".join((re.sub(_NO_THOUGHTS.pattern + r"\Z", "", head), self._opening, here, tail))
        first, *rest = re.split(_mark(re.escape(mark), "turn", r"(\d+)"), text)
        yield -1, first
        yield from zip(map(int, rest[::2]), rest[1::2], strict=True)

    def _spoken(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a turn behind its thinking and the white space after it. Only where a token reaches over
        that border, what is behind it is encoded again."""
        pieces = self._tokenizer.pieces(tokens)
        text = "".join(pieces)
        _, found, behind = text.partition(_THOUGHT)
        if not found:
            return ()
        start = len(text) - len(behind.lstrip())
        at = 0
        for number, piece in enumerate(pieces):
            if at == start:
                return tuple(tokens[number:])
            if at > start:
                break
            at += len(piece)
        return tuple(self._tokenizer.encode(behind.lstrip()))

    def _thoughts(self, text: str) -> tuple[str, str]:
        """Return the thinking of an answer, and what it says behind it."""
        begun = text.lstrip()
        if not self._thinks or not (self._opening or begun.startswith(_THINK)):
            return "", text
        thoughts, _, said = begun.removeprefix(_THINK).partition(_THOUGHT)
        return thoughts.strip(), said

    def _call_syntax(self, user: Message, header: str) -> tuple[str, str, str]:
        """Return what the template writes in front of a call's JSON object and behind it, and why there is none."""
        if not self._has_template:
            return CALL_CHARACTER, "", ""
        name = unused_mark("")
        function = {"name": name, "arguments": {"key": "value"}}
        call = {"id": "call00000", "type": "function", "function": function}
        mark = unused_mark(name)
        said = {"role": "assistant", "content": mark, "tool_calls": [call]}
        told = {"role": "tool", "tool_call_id": "call00000", "name": name, "content": mark}
        try:
            text = self._text([user, said], (_PROBE_TOOL,), to_answer=False)
            answered = self._text([user, {**said, "content": ""}, told], (_PROBE_TOOL,))
        except ModelError as error:
            return "", "", one_line(error, 300)
        for start in (found.start() for found in reversed([*re.finditer(r"\{", text[: max(0, text.find(name))])])):
            found = _call_at(text, start)
            if found is not None and found[:2] == (name, json.dumps(function["arguments"])):
                break
        else:
            return "", "", "the chat template writes no tool call as a JSON object with a name and its arguments"
        if mark not in answered:
            return "", "", "the chat template leaves out what a tool answers"
        before = _NO_THOUGHTS.sub("", text[:start])  # some templates leave out what is said beside a call
        opener = before.rpartition(mark if mark in before else header)[2]
        ends = "|".join(re.escape(self._tokenizer.decode([token], special=True)) for token in self.stop_tokens)
        return opener.strip(), re.split(ends, text[found[2] :])[0].strip(), ""


def plain(message: Mapping[str, Any]) -> Message:
    """Return a message as templates read it: its content as text, the arguments of its calls as objects, and nothing
    that is null or an empty list. Raises ValueError for one that is no message of text."""
    role, content = message.get("role"), message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        content = "".join(map(str, texts)) if len(texts) == len(content) else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"a message is {quoted(message)}, expected a role and a content of text")
    found = {key: value for key, value in message.items() if value is not None and value != []} | {"content": content}
    if calls := message.get("tool_calls"):
        try:
            functions = [dict(call["function"]) for call in calls]
            for function in functions:
                function["arguments"] = _value(function["arguments"])
                if not isinstance(function["name"], str):
                    raise TypeError
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"tool_calls are {quoted(calls)}, expected each with function: name and arguments"
            ) from error
        found["tool_calls"] = [{**call, "function": each} for call, each in zip(calls, functions, strict=True)]
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"a message is {quoted(message)}, expected JSON in UTF-8") from error
    return found


def _value(arguments: Any) -> Any:
    """Return the value of arguments given as JSON text; text that is none stays."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _mark(mark: str, what: str, place: int | str) -> str:
    return f"{mark}{what}{place}{mark}"


def _stub(mark: str, place: int, turn: Turn) -> Message:
    """Return a message with marks in place of what a sampled turn said and thought."""
    said: Message = {"role": "assistant", "content": _mark(mark, "turn", place)}
    return said | ({"reasoning_content": _mark(mark, "thoughts", place)} if turn.thought else {})


def _kinds(
    piece: str, outline: str, mark: str, messages: Sequence[Message], starts: Sequence[int]
) -> NDArray[np.uint8]:
    """Return the kinds of tokens that begin at `starts` [tokens] of a piece of text. `outline` is the same piece with
    marks in place of contents."""
    kinds = np.full(len(starts), TokenKind.TEMPLATE, np.uint8)
    places = np.array(starts, np.int64)
    first, *rest = re.split(_mark(re.escape(mark), "content", r"(\d+)"), outline)
    at = len(first)
    for place, behind in zip(map(int, rest[::2]), rest[1::2], strict=True):
        message = messages[place]
        end = piece.find(behind, at + len(message["content"].strip()))  # a template may write it as JSON, or strip it
        if end < 0:
            break  # the template writes something else of this content
        kinds[(places >= at) & (places < end)] = _KINDS[message["role"]]
        at = end + len(behind)
    return kinds


_DECODER = json.JSONDecoder()
Call = tuple[str, str]
"""A tool's name, and its arguments as JSON text."""


def _call_at(text: str, at: int) -> tuple[str, str, int] | None:
    """Return the name, the arguments and the end of the call at a place of a text; None: there is none."""
    try:
        found, end = _DECODER.raw_decode(text, at)
        arguments = _value(found.get("arguments", found.get("parameters", {})))
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (found["name"] + written).encode()
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None
    return (found["name"], written, end) if isinstance(arguments, dict) else None


def _calls_at(text: str, at: int, closer: str) -> tuple[list[Call], int]:
    """Return the calls from a place of a text up to `closer`, or to the text's end without one; none if anything else
    is between. Calls may be separated by commas or semicolons. Also return where they end."""
    calls = list[Call]()
    while (found := _call_at(text, _behind_space(text, at))) is not None:
        calls.append(found[:2])
        at = _behind_space(text, found[2])
        if text.startswith(closer, at) if closer else at == len(text):
            return calls, at + len(closer)
        at += text[at : at + 1] in (",", ";")
    return [], at


def _behind_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _tagged_calls(text: str, opener: str, closer: str) -> tuple[list[Call], str, int]:
    """Return the calls of an answer that marks them, the rest of it, and the number of malformed ones in that."""
    calls, rest, malformed, at = list[Call](), "", 0, 0
    while (start := text.find(opener, at)) >= 0:
        found, end = _calls_at(text, start + len(opener), closer)
        calls += found
        malformed += not found
        rest += text[at : start if found else start + len(opener)]
        at = end if found else start + len(opener)
    return calls, rest + text[at:], malformed


def _bare_calls(text: str, tools: Sequence[Tool]) -> tuple[list[Call], str, int]:
    """Return the same of an answer of Llama's form: nothing but calls, or calls or code behind a tag."""
    before, tagged, behind = text.partition(_PYTHON_TAG)
    if not tagged and not text.lstrip().startswith("{"):
        return [], text, 0
    content, said = (before, behind) if tagged else ("", text)
    if calls := _calls_at(said, 0, "")[0]:
        return calls, content, 0
    code = next((tool for tool in tools if tool["function"]["name"] == _PYTHON), None)
    if tagged and said.strip() and not said.lstrip().startswith("{") and code is not None:
        return [_call_of(code, said.strip())], content, 0
    return [], text, int(bool(tagged) or '"name"' in said)


def _plain_calls(text: str, tools: Sequence[Tool]) -> tuple[list[Call], str, int]:
    """Return the same of an answer in characters. Behind each `!` stands the name of a tool, a space and its first
    argument, or only that of the first tool."""
    content, *said = text.split(CALL_CHARACTER)
    if not tools or not said:
        return [], text, 0
    if not all(said):
        return [], text, sum(not each for each in said)
    by_name = {tool["function"]["name"]: tool for tool in tools}
    named = [(each.partition(" "), each) for each in said]
    return (
        [
            _call_of(by_name[name], behind) if name in by_name else _call_of(tools[0], each)
            for (name, _, behind), each in named
        ],
        content,
        0,
    )


def _call_of(tool: Tool, argument: str) -> Call:
    """Return a call of a tool with its first parameter alone."""
    function = tool["function"]
    names = [*function.get("parameters", {}).get("properties", {})]
    return function["name"], json.dumps(dict.fromkeys(names[:1], argument), ensure_ascii=False)


def _called(message: Message, tools: Sequence[Tool]) -> str:
    """Return the calls of a message that no engine sampled, in characters."""
    written = ""
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        own = f"{name} " if not tools or name != tools[0]["function"]["name"] else ""
        values = arguments.values() if isinstance(arguments, dict) else [arguments]
        written += CALL_CHARACTER + own + "".join(map(str, values))
    return written
