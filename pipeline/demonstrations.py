"""Tokenize the rows that `evenkeel sft` trains on, and mark the learned tokens.

{"prompt": text, "response": text}     the response and the end-of-sequence token are learned
{"messages": [{"role", "content"}]}    through the chat template; every answer of the assistant is learned, with the
                                         mark that ends its turn

A template writes a conversation as one text. The text before an answer is what the template writes for the earlier
messages when it asks for an answer: exactly the engine's prompt. The text from there to the mark that ends the turn is
the model's. The answer's end is found by writing the conversation again with a mark behind the answer, since the
answer's text may also occur elsewhere, in the template's words.

Base models come with the template of their chat models. Qwen's ends an answer by <|im_end|>, but the base's end of
sequence is <|endoftext|>: a model trained on such answers samples up to the longest answer allowed. A server stops at
all ends in config.json, generation_config.json and the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ModelError, RecipeError
from pipeline.tasks.folder_tokenizer import read_object
from pipeline.tasks.rows import Row, read_rows
from pipeline.tasks.task import normalized
from pipeline.tasks.tokenizer import Tokenizer, check_written, unused_mark
from precision.text import listed, one_line, quoted

Piece = tuple[str, bool]
"""Text, and whether it is the model's."""
_AS_TEXT = (
    "give the row as prompt and response, with all that the template writes before the answer in the prompt, and set "
    "task.chat_template=false"
)


def pieces_of(messages: Sequence[Mapping[str, Any]], template: Tokenizer, where: str) -> list[Piece]:
    """Split a conversation into pieces of the template's text, up to its last answer. Raises RecipeError, with `where`,
    for a message that the template changes or omits."""
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
        tail = whole[end:]  # some templates end the last turn by one mark more
        marks = [*(found.start() for found in re.finditer(r"[<\[\s]", closing)), len(closing)]
        stop = end + next(mark for mark in (*reversed(marks), 0) if tail.startswith(closing[:mark]))
        pieces += [(whole[at:start], False), (whole[start:stop], True)]
        at = stop
    return pieces


def _start(whole: str, messages: Sequence[Mapping[str, Any]], number: int, template: Tokenizer, where: str) -> int:
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
    whole: str, start: int, messages: Sequence[Mapping[str, Any]], number: int, template: Tokenizer, where: str
) -> int:
    """Return the answer's end. It begins at `start`, later after template text, or earlier with opened thoughts."""
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
    """Remove white space: templates normalize the blank lines around thoughts."""
    return "".join(text.split())


def _closing(tail: str, eos_token: str) -> str:
    """Return the end of a turn: up to the end-of-sequence token, or up to trailing white space where there is none."""
    found = tail.find(eos_token) if eos_token else -1
    return tail.rstrip() if found < 0 else tail[: found + len(eos_token)]


_SHOWN = 400
"""Characters of each piece of the first row that are shown."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Demonstration:
    """A row as tokens: `prompt`, then `response`. Arrays, since every rank holds all rows."""

    prompt: NDArray[np.int32]
    """[prompt tokens]"""
    response: NDArray[np.int32]
    """[response tokens]"""
    learned: NDArray[np.bool_]
    """[response tokens] True for the model's tokens, such as the first; False for those of other speakers."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, kw_only=True)
class Form:
    tokenizer: Tokenizer
    chat_template: bool
    """Whether the chat template is applied to a text prompt; it always is to messages."""
    system_prompt: str | None
    """The system prompt of conversations that do not start with a system message."""


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """The rows of a file that fit, in its order."""

    rows: tuple[Demonstration, ...]
    first: str
    """The first row as the model reads it, with learned text between » and «."""
    notes: tuple[str, ...]
    keys: tuple[str, ...]
    """A digest of each row's first prompt, equal for prompts that differ in case and white space alone."""

    def split(self, share: float) -> tuple[Demonstrations, Demonstrations]:
        """Split into (training, held-out `share`) by the prompt's digest. Raises RecipeError when one part is empty."""
        out = [int(key, 16) < share * 16 ** len(key) for key in self.keys]
        training, held_out = self._of([not one for one in out]), self._of(out)
        if not training.rows or not held_out.rows:
            raise RecipeError(
                f"--held-out {share:g} of {len(self.rows)} rows leaves {len(training.rows)} to train on and "
                f"{len(held_out.rows)} held out, expected some of both; name a file of held-out rows"
            )
        return training, held_out

    def _of(self, chosen: Sequence[bool]) -> Demonstrations:
        rows = tuple(row for row, taken in zip(self.rows, chosen, strict=True) if taken)
        keys = tuple(key for key, taken in zip(self.keys, chosen, strict=True) if taken)
        return Demonstrations(rows=rows, first=self.first, notes=self.notes, keys=keys)


def read_demonstrations(path: Path, form: Form, *, longest: int) -> Demonstrations:
    """Read the rows of a file or folder (pipeline.tasks.rows) of at most `longest` tokens, and count the others. Raises
    RecipeError, with file and row, for a row that is no demonstration, and when no row is left."""
    rows, keys, first, too_long, most = [], [], "", 0, 0
    spelt: dict[str, str] = {}  # normalized → the first such prompt, by whose digest all of them are split
    for row in read_rows(path):
        pieces, ends = _pieces(row, form)
        found = _tokens(pieces, ends, form.tokenizer, row.where)
        if len(found) > longest:
            too_long, most = too_long + 1, max(most, len(found))
            continue
        first = first or _shown(pieces)
        rows.append(found)
        prompt = spelt.setdefault(normalized(pieces[0][0]), pieces[0][0])
        keys.append(hashlib.sha256(prompt.encode()).hexdigest()[:16])
    said = (
        f"{too_long} of {too_long + len(rows)} rows of {path} have more than {longest} tokens (rollout.context_tokens)"
    )
    if not rows:
        raise RecipeError(f"{said}, up to {most}; raise it")
    notes = (f"{said} and are left out; the longest has {most}",) if too_long else ()
    return Demonstrations(rows=tuple(rows), first=first, notes=notes, keys=tuple(keys))


def _pieces(row: Row, form: Form) -> tuple[list[Piece], bool]:
    """Return the row's pieces, and whether to append the end-of-sequence token (a template ends its own text)."""
    prompt, response, messages = (row.values.get(key) for key in ("prompt", "response", "messages"))
    whole = isinstance(messages, list) and response is None  # whatever `prompt` is then
    if isinstance(prompt, str) and isinstance(response, str):
        if not form.chat_template:
            if not prompt or not response:
                empty = "response" if prompt else "prompt"
                raise RecipeError(f"{row.where}: {empty} is empty, expected text; remove the row")
            return [(prompt, False), (response, True)], True
        messages = [dict(role="user", content=prompt), dict(role="assistant", content=response)]
    elif not whole and not (isinstance(prompt, str | None) and isinstance(response, str | None)):
        name, got = ("response", response) if isinstance(prompt, str | None) else ("prompt", prompt)
        raise RecipeError(f"{row.where}: {name} is {quoted(got)}, expected text; or give messages")
    if messages is None:
        keys = listed([one_line(key, 40) for key in row.values], most=12, between=", ") or "none"
        raise RecipeError(
            f'{row.where}: expected {{"prompt": text, "response": text}} or {{"messages": […]}}; keys found: {keys}; '
            "rename them"
        )
    return pieces_of(_checked(messages, form, row.where), form.tokenizer, row.where), False


def _checked(messages: object, form: Form, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(messages, list) or not all(
        isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("role", "content")) for one in messages
    ):
        raise RecipeError(
            f'{where}: messages are {quoted(messages)}, expected a list of {{"role": …, "content": text}}'
        )
    found = [{key: value for key, value in one.items() if value is not None} for one in messages]
    if not found or found[-1]["role"] != "assistant":
        last = f"end with the {one_line(found[-1]['role'], 20)}'s" if found else "are none"
        raise RecipeError(
            f"{where}: messages {last}, so that there is no answer to learn; end them with the assistant's"
        )
    if not all(one["content"].strip() for one in found if one["role"] == "assistant"):
        raise RecipeError(f"{where}: an answer of the assistant is empty, expected text; remove the row")
    if form.system_prompt is None or found[0]["role"] == "system":
        return list(found)
    return [dict(role="system", content=form.system_prompt), *found]


def _tokens(pieces: Sequence[Piece], ends: bool, tokenizer: Tokenizer, where: str) -> Demonstration:
    """Tokenize each piece separately, as engines tokenize prompts and responses."""
    try:
        ids = [tokenizer.encode(text) for text, _ in pieces]
    except ModelError as error:
        raise RecipeError(f"{where}: {error}") from error
    if not ids[0] or not any(ids[1:]):
        empty = "response" if ids[0] else "prompt"
        raise RecipeError(f"{where}: the tokenizer makes no token of the {empty}; remove the row")
    learned = np.repeat([said for _, said in pieces[1:]], [len(tokens) for tokens in ids[1:]])
    if ends:
        ids.append([tokenizer.eos_token_id])
        learned = np.append(learned, True)
    return Demonstration(
        prompt=np.array(ids[0], np.int32),
        response=np.array([token for tokens in ids[1:] for token in tokens], np.int32),
        learned=learned,
    )


def _shown(pieces: Sequence[Piece]) -> str:
    cut = [text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …" for text, _ in pieces]
    return "".join(f"»{text}«" if said else text for text, (_, said) in zip(cut, pieces, strict=True))


_GENERATION_FILE = "generation_config.json"


def unstopped_end(tokenizer: Tokenizer) -> int | None:
    """Return the token that ends the template's answers but at which no server stops. None also for an end that is no
    single special token, or a template that fails on a plain question and answer. Raises ModelError."""
    said = "Yes, ten."
    asked = [dict(role="user", content="Is it ten?"), dict(role="assistant", content=said)]
    stops = {tokenizer.eos_token_id, *named_ends(tokenizer.folder)}
    try:
        _, found, tail = tokenizer.conversation(asked, to_answer=False).rpartition(said)
        closing = tokenizer.encode(_closing(tail, tokenizer.eos_token) if found else "")
    except ModelError:
        return None
    if not closing or closing[-1] not in tokenizer.reserved or stops & set(closing):
        return None
    return closing[-1]


def learned_end(rows: Iterable[Demonstration], tokenizer: Tokenizer) -> int | None:
    end = unstopped_end(tokenizer)
    return end if end is not None and any(row.response[-1] == end for row in rows) else None


def write_with_end(tokenizer: Tokenizer, end: int, folder: Path) -> None:
    """Write generation_config.json into `folder`, with `end` added to the tokens at which servers stop."""
    stops = {tokenizer.eos_token_id, *named_ends(tokenizer.folder)}
    named = read_object(tokenizer.folder / _GENERATION_FILE) | dict(eos_token_id=[*sorted(stops), end])
    (folder / _GENERATION_FILE).write_text(json.dumps(named, indent=1) + "\n", encoding="utf-8")


def named_ends(folder: Path) -> set[int]:
    """Return the end-of-sequence ids in a model folder. Raises ModelError for an unreadable file."""
    named = [read_object(folder / name).get("eos_token_id") for name in ("config.json", _GENERATION_FILE)]
    each = [one for value in named for one in (value if isinstance(value, list) else [value])]
    return {one for one in each if isinstance(one, int)}
