"""The token by which a chat template ends an answer, where no server stops at it.

Base models come with the template of their chat models. That of Qwen ends an answer by <|im_end|>, and the end of
sequence of the base is <|endoftext|>: whoever has learned such answers says <|im_end|>, and goes on up to the longest
answer allowed. A server stops at what config.json, generation_config.json and the tokenizer name together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pipeline.demonstrations.conversation import closing_mark
from pipeline.demonstrations.rows import Demonstration
from pipeline.errors import ModelError
from pipeline.tasks.folder_tokenizer import read_object
from pipeline.tasks.tokenizer import Tokenizer

_GENERATION_FILE = "generation_config.json"


def unstopped_end(tokenizer: Tokenizer) -> int | None:
    """The id of that token; None: a server stops, or what ends an answer is no token of its own, or the template writes
    no plain question and answer. Raises ModelError for a file of the folder that cannot be read."""
    stops = _stop_ids(tokenizer)
    try:
        closing = tokenizer.encode(closing_mark(tokenizer))
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
    named = read_object(tokenizer.folder / _GENERATION_FILE) | dict(eos_token_id=[*sorted(_stop_ids(tokenizer)), end])
    (folder / _GENERATION_FILE).write_text(json.dumps(named, indent=1) + "\n", encoding="utf-8")


def named_ends(folder: Path) -> set[int]:
    """The ids at which a model folder says that a text ends. Raises ModelError for a file that cannot be read."""
    named = [read_object(folder / name).get("eos_token_id") for name in ("config.json", _GENERATION_FILE)]
    each = [one for value in named for one in (value if isinstance(value, list) else [value])]
    return {one for one in each if isinstance(one, int)}


def _stop_ids(tokenizer: Tokenizer) -> set[int]:
    return {tokenizer.eos_token_id, *named_ends(tokenizer.folder)}
