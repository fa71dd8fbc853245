"""Which text of a conversation, as the chat template writes it, the model itself says.

A template writes a conversation as one text. What it writes before an answer is what it writes for the messages before
it, ready for an answer: exactly what an engine reads when it is to answer. From there on the text is the model's, up to
the mark that ends its turn. The end is found by writing the conversation once more, with a mark behind the answer: its
text alone may stand elsewhere too, in what the template puts before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from pipeline.errors import RecipeError
from pipeline.tasks.chat_template import Template, check_written, unused_mark
from precision.text import quoted

Piece = tuple[str, bool]
"""Text, and whether the model says it."""
_AS_TEXT = (
    "give the row as prompt and response, with all that the template writes before the answer in the prompt, and set "
    "task.chat_template=false"
)


def pieces_of(messages: Sequence[Mapping[str, Any]], template: Template, where: str) -> list[Piece]:
    """The conversation, whose last message is an answer, in pieces that add up to the template's text. What it writes
    after the last answer is left out. Raises RecipeError, with `where`, for an answer that the template changes and for
    a message that it leaves out."""
    whole = template.conversation(messages, to_answer=False)
    check_written(messages, whole, template, where)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    starts = [_start(whole, messages, number, template, where) for number in answers]
    ends = [
        _end(whole, start, messages, number, template, where) for start, number in zip(starts, answers, strict=True)
    ]
    closing = _closing(whole[ends[-1] :], template.eos_token)
    pieces: list[Piece] = []
    at = 0
    for start, end in zip(starts, ends, strict=True):
        stop = end + len(_common_marks(closing, whole[end:]))
        pieces += [(whole[at:start], False), (whole[start:stop], True)]
        at = stop
    return pieces


def _start(whole: str, messages: Sequence[Mapping[str, Any]], number: int, template: Template, where: str) -> int:
    asked = template.conversation(messages[:number])
    if whole.startswith(asked):
        return len(asked)
    if number + 1 < len(messages):
        raise RecipeError(
            f"{where}: the chat template writes the first {number} messages otherwise when more follow, so that an "
            "answer would be learned after a text that no engine reads; end the row with that answer"
        )
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, asked, strict=False)))
    raise RecipeError(
        f"{where}: engines answer after {quoted(asked[shared:])}, which the chat template writes only to ask for "
        f"an answer, so that message {number + 1} would be learned after a text that no engine reads; {_AS_TEXT}"
    )


def _end(
    whole: str, start: int, messages: Sequence[Mapping[str, Any]], number: int, template: Template, where: str
) -> int:
    """Where the answer ends. It begins at `start`; or later, where the template puts something first; or before, where
    the template has opened its thoughts when it asked for it."""
    mark = unused_mark(whole)
    content, thoughts = str(messages[number]["content"]), messages[number].get("reasoning_content")
    text = content.rstrip()
    blank = content[len(text) :]
    marked = [*messages[:number], {**messages[number], "content": text + mark + blank}]
    end = template.conversation([*marked, *messages[number + 1 :]], to_answer=False).find(mark)
    kept = end >= start and _letters(whole[:end]).endswith(_letters(content))
    if not kept or (isinstance(thoughts, str) and _letters(thoughts) not in _letters(whole[start:end])):
        earlier = number + 1 < len(messages)
        instead = (
            "end the row with that answer, or remove its thoughts" if earlier else f"remove its thoughts, or {_AS_TEXT}"
        )
        raise RecipeError(
            f"{where}: the chat template does not write message {number + 1} as it stands (templates leave out "
            f"thoughts, most of them those of earlier answers); {instead}"
        )
    return end + len(blank) if whole.startswith(blank, end) else end


def _letters(text: str) -> str:
    """Without white space: templates write the blank lines around thoughts as the model was trained on them."""
    return "".join(text.split())


def _closing(tail: str, eos_token: str) -> str:
    """What ends a turn: up to the end-of-sequence token, or all but white space where the template has another mark."""
    found = tail.find(eos_token) if eos_token else -1
    return tail.rstrip() if found < 0 else tail[: found + len(eos_token)]


def _common_marks(closing: str, tail: str) -> str:
    """With how much of what closes the last turn a `tail` begins: some templates end the last turn by one mark more."""
    ends = [*(found.start() for found in re.finditer(r"[<\[\s]", closing)), len(closing)]
    return next(closing[:end] for end in (*reversed(ends), 0) if tail.startswith(closing[:end]))


def closing_mark(template: Template) -> str:
    """What the template writes behind an answer, as far as the model learns it; empty where it changes the answer."""
    said = "Yes, ten."
    asked = [dict(role="user", content="Is it ten?"), dict(role="assistant", content=said)]
    _, found, tail = template.conversation(asked, to_answer=False).rpartition(said)
    return _closing(tail, template.eos_token) if found else ""
