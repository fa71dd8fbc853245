"""Translate requests and answers of OpenAI's chat completions and Anthropic's messages to those of an episode.

A message inside has OpenAI's shape. Sampling settings of a request are never obeyed: they are counted by name. A
request for what an episode cannot give, such as several choices, raises ValueError.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.episodes.episode import Turn

Json = Mapping[str, Any]
_OPENAI_ASKED = frozenset(("messages", "tools", "model", "stream", "stream_options", "user", "metadata", "store", "n"))
_ANTHROPIC_ASKED = frozenset(("messages", "system", "tools", "model", "stream", "metadata"))
_PIECE_CHARACTERS = 256


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks of its episode."""

    messages: tuple[Json, ...]
    tools: tuple[Json, ...]
    ignored: tuple[str, ...]
    """Names of settings that have no effect."""
    stream: bool
    usage: bool
    """Whether a stream ends with the numbers of tokens."""
    model: str


def read_openai(body: Json) -> Asked:
    """Read a request of /v1/chat/completions. Raises ValueError that says what is wrong."""
    if body.get("n") not in (None, 1):
        raise ValueError(f"n is {body['n']}, expected 1: an episode continues by one message at a time")
    messages = []
    for message in _objects(body, "messages", least=1):
        role = "system" if message.get("role") == "developer" else message.get("role")
        if role not in ("system", "user", "assistant", "tool"):
            raise ValueError(f"a message has the role {role!r}, expected system, developer, user, assistant or tool")
        kept = {key: message[key] for key in ("tool_calls", "tool_call_id", "name") if message.get(key)}
        if reasoning := message.get("reasoning_content"):
            kept["reasoning_content"] = reasoning
        messages.append({"role": role, "content": _text(message.get("content")), **kept})
    options = body.get("stream_options") or {}
    return Asked(
        messages=tuple(messages),
        tools=tuple(_objects(body, "tools")),
        ignored=tuple(sorted(key for key, value in body.items() if key not in _OPENAI_ASKED and value is not None)),
        stream=bool(body.get("stream")),
        usage=bool(options.get("include_usage")),
        model=str(body.get("model") or "policy"),
    )


def read_anthropic(body: Json) -> Asked:
    """Read a request of /v1/messages. Raises ValueError that says what is wrong."""
    messages: list[Json] = []
    if system := _text(body.get("system")):
        messages.append(dict(role="system", content=system))
    for message in _objects(body, "messages", least=1):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise ValueError(f"a message has the role {role!r}, expected user or assistant")
        blocks = [dict(type="text", text=content)] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise ValueError("a message's content is neither a text nor a list of blocks")
        text = [str(block.get("text", "")) for block in blocks if block.get("type") == "text"]
        if role == "user":
            for block in blocks:
                if block.get("type") == "tool_result":
                    result = dict(
                        role="tool", tool_call_id=block.get("tool_use_id"), content=_text(block.get("content"))
                    )
                    messages.append(result)
            if text or not any(block.get("type") == "tool_result" for block in blocks):
                messages.append(dict(role="user", content="".join(text)))
            continue
        said: dict[str, Any] = dict(role="assistant", content="".join(text))
        if thoughts := [str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking"]:
            said["reasoning_content"] = "".join(thoughts)
        calls = [block for block in blocks if block.get("type") == "tool_use"]
        if calls:
            said["tool_calls"] = [
                _call(block.get("id"), block.get("name"), json.dumps(block.get("input") or {}, ensure_ascii=False))
                for block in calls
            ]
        messages.append(said)
    tools = [
        dict(
            type="function",
            function=dict(
                name=tool.get("name"),
                description=tool.get("description", ""),
                parameters=tool.get("input_schema") or {},
            ),
        )
        for tool in _objects(body, "tools")
    ]
    return Asked(
        messages=tuple(messages),
        tools=tuple(tools),
        ignored=tuple(sorted(key for key, value in body.items() if key not in _ANTHROPIC_ASKED and value is not None)),
        stream=bool(body.get("stream")),
        usage=True,
        model=str(body.get("model") or "policy"),
    )


def _objects(body: Json, key: str, *, least: int = 0) -> list[dict[str, Any]]:
    found = body.get(key) or []
    if not isinstance(found, list) or len(found) < least or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{key} is no list of at least {least} objects")
    return found


def _text(content: Any) -> str:
    """Return the text of a content, a string or parts of type text. Raises ValueError for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"a content is {type(content).__name__}, expected a text or a list of parts")
    pieces = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "refusal"):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"a part of a content is {kind!r}; only text can be read")
        pieces.append(str(part.get("text") or part.get("refusal") or ""))
    return "".join(pieces)


def _call(number: Any, name: Any, arguments: str) -> dict[str, Any]:
    return dict(id=str(number), type="function", function=dict(name=str(name), arguments=arguments))


def openai_answer(asked: Asked, turn: Turn, number: str) -> dict[str, Any]:
    """Return the body of an answer that is not streamed."""
    message = dict(turn.message)
    return dict(
        id=f"chatcmpl-{number}",
        object="chat.completion",
        created=int(time.time()),
        model=asked.model,
        choices=[
            dict(index=0, message={**message, "content": message.get("content") or None}, finish_reason=turn.finish)
        ],
        usage=_openai_usage(turn),
    )


def _openai_usage(turn: Turn) -> dict[str, int]:
    return dict(
        prompt_tokens=turn.prompt_tokens,
        completion_tokens=turn.sampled_tokens,
        total_tokens=turn.prompt_tokens + turn.sampled_tokens,
    )


def openai_stream(asked: Asked, turn: Turn, number: str) -> Iterator[str]:
    """Yield the server-sent events of an answer."""
    message = turn.message
    fixed = dict(id=f"chatcmpl-{number}", object="chat.completion.chunk", created=int(time.time()), model=asked.model)

    def chunk(delta: Json, finish: str | None = None) -> str:
        return _event({**fixed, "choices": [dict(index=0, delta=delta, finish_reason=finish)]})

    yield chunk(dict(role="assistant", content=""))
    for key in ("reasoning_content", "content"):
        for piece in _pieces(message.get(key)):
            yield chunk({key: piece})
    for place, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        yield chunk(
            dict(
                tool_calls=[
                    dict(
                        index=place, id=call["id"], type="function", function=dict(name=function["name"], arguments="")
                    )
                ]
            )
        )
        for piece in _pieces(function["arguments"]):
            yield chunk(dict(tool_calls=[dict(index=place, function=dict(arguments=piece))]))
    yield chunk({}, turn.finish)
    if asked.usage:
        yield _event({**fixed, "choices": [], "usage": _openai_usage(turn)})
    yield "data: [DONE]\n\n"


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def anthropic_answer(asked: Asked, turn: Turn, number: str) -> dict[str, Any]:
    """Return the body of an answer that is not streamed."""
    message, blocks = turn.message, list[dict[str, Any]]()
    if thought := message.get("reasoning_content"):
        blocks.append(dict(type="thinking", thinking=thought, signature=""))
    if text := message.get("content"):
        blocks.append(dict(type="text", text=text))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        blocks.append(
            dict(type="tool_use", id=call["id"], name=function["name"], input=_arguments(function["arguments"]))
        )
    return dict(
        id=f"msg_{number}",
        type="message",
        role="assistant",
        model=asked.model,
        content=blocks,
        stop_reason=_STOP_REASONS[turn.finish],
        stop_sequence=None,
        usage=dict(input_tokens=turn.prompt_tokens, output_tokens=turn.sampled_tokens),
    )


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object; Anthropic's protocol has no other."""
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    return found if isinstance(found, dict) else {"arguments": found}


def anthropic_stream(asked: Asked, turn: Turn, number: str) -> Iterator[str]:
    """Yield the server-sent events of an answer."""
    whole = anthropic_answer(asked, turn, number)
    usage = dict(input_tokens=turn.prompt_tokens, output_tokens=0)
    start = {**whole, "content": [], "stop_reason": None, "usage": usage}
    yield _named("message_start", dict(message=start))
    for index, block in enumerate(whole["content"]):
        kind = block["type"]
        empty: dict[str, Any]
        deltas: list[dict[str, Any]]
        if kind == "text":
            empty, deltas = {**block, "text": ""}, [dict(type="text_delta", text=p) for p in _pieces(block["text"])]
        elif kind == "thinking":
            empty = {**block, "thinking": ""}
            deltas = [dict(type="thinking_delta", thinking=piece) for piece in _pieces(block["thinking"])]
        else:
            empty, written = {**block, "input": {}}, json.dumps(block["input"], ensure_ascii=False)
            deltas = [dict(type="input_json_delta", partial_json=piece) for piece in _pieces(written)]
        yield _named("content_block_start", dict(index=index, content_block=empty))
        for delta in deltas:
            yield _named("content_block_delta", dict(index=index, delta=delta))
        yield _named("content_block_stop", dict(index=index))
    end = dict(stop_reason=whole["stop_reason"], stop_sequence=None)
    yield _named("message_delta", dict(delta=end, usage=dict(output_tokens=turn.sampled_tokens)))
    yield _named("message_stop", {})


def _pieces(text: str | None) -> Sequence[str]:
    return [text[at : at + _PIECE_CHARACTERS] for at in range(0, len(text), _PIECE_CHARACTERS)] if text else ()


def _event(data: Json) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _named(kind: str, data: Json) -> str:
    return f"event: {kind}\n{_event(dict(type=kind, **data))}"
