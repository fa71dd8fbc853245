"""Make tokens of the rows that `evenkeel sft` trains on, and say which of them are learned.

{"prompt": text, "response": text}     the response and the end-of-sequence token are learned
{"messages": [{"role", "content"}]}    through the chat template; every answer of the assistant is learned, with the
                                       mark that ends its turn

A template writes a conversation as one text. What it writes before an answer is what it writes for the messages before
it, ready for an answer: exactly what an engine reads when it is to answer. From there on the text is the model's, up to
the mark that ends its turn. The end is found by writing the conversation once more, with a mark behind the answer: its
text alone may stand elsewhere too, in what the template puts before it.

Base models come with the template of their chat models. That of Qwen ends an answer by <|im_end|>, and the end of
sequence of the base is <|endoftext|>: a model that has learned such answers goes on up to the longest answer allowed. A
server stops at what config.json, generation_config.json and the tokenizer name together.
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
"""Text, and whether the model says it."""
_AS_TEXT = (
    "give the row as prompt and response, with all that the template writes before the answer in the prompt, and set "
    "task.chat_template=false"
)


def pieces_of(messages: Sequence[Mapping[str, Any]], template: Tokenizer, where: str) -> list[Piece]:
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


_SHOWN = 400
"""Characters of the first row that are shown of each piece."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Demonstration:
    """One row as tokens: the model reads `prompt`, then `response`. Arrays, since every rank holds all rows."""

    prompt: NDArray[np.int32]
    """[prompt tokens] ids."""
    response: NDArray[np.int32]
    """[response tokens] ids."""
    learned: NDArray[np.bool_]
    """[response tokens] the first is True; False for what others say in between."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, kw_only=True)
class Form:
    """How rows become text."""

    tokenizer: Tokenizer
    chat_template: bool
    """Whether a prompt that is text is put through the chat template; messages always are."""
    system_prompt: str | None
    """Before each conversation that does not begin with a system message itself."""


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """The rows of a file that fit, in its order."""

    rows: tuple[Demonstration, ...]
    first: str
    """The first row as the model reads it, what is learned between » and «."""
    notes: tuple[str, ...]
    """What to say about the data before training begins."""
    keys: tuple[str, ...]
    """A digest of each row's first prompt: rows that share it, but for case and white space, are not to be parted over
    training and held out."""

    def split(self, share: float) -> tuple[Demonstrations, Demonstrations]:
        """To train on, and the `share` held out, by the digest of the prompt. Raises RecipeError when one is empty."""
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
    """All rows of a file or folder (pipeline.tasks.rows) of at most `longest` tokens; the others are counted.

    Raises RecipeError, with file and row, for a row that is no demonstration, and when none is left.
    """
    rows, keys, first, too_long, most = [], [], "", 0, 0
    spelt: dict[str, str] = {}  # normalized → the first prompt that reads so, by which all of them are split
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
    """The row's text, and whether the end-of-sequence token ends it (otherwise the template has ended it)."""
    prompt, response, messages = (row.values.get(key) for key in ("prompt", "response", "messages"))
    whole = isinstance(messages, list) and response is None  # whatever else is called prompt
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
    """Every piece by itself, as engines get prompts and give responses."""
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
    """The id of that token; None: a server stops, or what ends an answer is no token of its own, or the template writes
    no plain question and answer. Raises ModelError for a file of the folder that cannot be read."""
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
    """As `unstopped_end`, where one of the rows ends so."""
    end = unstopped_end(tokenizer)
    return end if end is not None and any(row.response[-1] == end for row in rows) else None


def write_with_end(tokenizer: Tokenizer, end: int, folder: Path) -> None:
    """Write the tokenizer's generation_config.json into `folder`, with `end` beside all at which servers stop."""
    stops = {tokenizer.eos_token_id, *named_ends(tokenizer.folder)}
    named = read_object(tokenizer.folder / _GENERATION_FILE) | dict(eos_token_id=[*sorted(stops), end])
    (folder / _GENERATION_FILE).write_text(json.dumps(named, indent=1) + "\n", encoding="utf-8")


def named_ends(folder: Path) -> set[int]:
    """The ids at which a model folder says that a text ends. Raises ModelError for a file that cannot be read."""
    named = [read_object(folder / name).get("eos_token_id") for name in ("config.json", _GENERATION_FILE)]
    each = [one for value in named for one in (value if isinstance(value, list) else [value])]
    return {one for one in each if isinstance(one, int)}
