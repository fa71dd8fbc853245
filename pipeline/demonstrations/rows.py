"""From rows of the user's own to tokens, with what is learned of them.

{"prompt": text, "response": text}     the response and the end-of-sequence token are learned
{"messages": [{"role", "content"}]}    through the chat template; every answer of the assistant is learned, with the
                                       mark that ends its turn
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.demonstrations.conversation import Piece, pieces_of
from pipeline.errors import ModelError, RecipeError
from pipeline.tasks.base import normalized
from pipeline.tasks.rows import read_rows
from pipeline.tasks.rows.row import Row
from pipeline.tasks.tokenizer import Tokenizer
from precision.text import listed, one_line, quoted

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
