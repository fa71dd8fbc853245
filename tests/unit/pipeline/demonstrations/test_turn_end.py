"""Answers that end by a token at which no server stops are seen, and servers of what learned them stop there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from pipeline.demonstrations import Demonstration, learned_end, unstopped_end, write_with_end
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}CLOSING\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def base(
    folder: Path, template: str = CHATML, closing: str = "<|im_end|>", files: Mapping[str, Any] | None = None
) -> Tokenizer:
    """As Qwen's base models are: a chat template, whose tokens there are, and another end of sequence."""
    write_character_tokenizer(folder, "0123456789;?")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template.replace("CLOSING", closing))
    for name, value in (files or {}).items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return Tokenizer.load(folder)


def im_end(tokenizer: Tokenizer) -> int:
    return tokenizer.vocabulary["<|im_end|>"]


@pytest.mark.parametrize("closing", ["<|im_end|>", ";<|im_end|>"])
def test_an_end_at_which_no_server_stops_is_seen(tmp_path: Path, closing: str) -> None:
    tokenizer = base(
        tmp_path, closing=closing, files=dict(config=dict(eos_token_id=1), generation_config=dict(eos_token_id=[0]))
    )
    assert unstopped_end(tokenizer) == im_end(tokenizer)


@pytest.mark.parametrize("named", [{"config": 15}, {"generation_config": 15}, {"generation_config": [1, 15]}])
def test_servers_stop_at_what_any_file_names(tmp_path: Path, named: dict[str, Any]) -> None:
    tokenizer = base(tmp_path, files={name: dict(eos_token_id=value) for name, value in named.items()})
    assert im_end(tokenizer) == 15
    assert unstopped_end(tokenizer) is None


def test_only_rows_that_end_so_have_learned_it(tmp_path: Path) -> None:
    tokenizer = base(tmp_path)
    plain = Demonstration(prompt=(2,), response=(3, tokenizer.eos_token_id), learned=(True, True))
    chat = Demonstration(prompt=(2,), response=(3, im_end(tokenizer)), learned=(True, True))
    assert learned_end([plain, plain], tokenizer) is None
    assert learned_end([plain, chat], tokenizer) == im_end(tokenizer)


@pytest.mark.parametrize(("own", "ends"), [({}, [1, 15]), (dict(eos_token_id=0, top_k=20), [0, 1, 15])])
def test_servers_of_the_folder_stop_there_too(tmp_path: Path, own: dict[str, Any], ends: list[int]) -> None:
    tokenizer, out = base(tmp_path / "model", files={"generation_config": own} if own else {}), tmp_path / "out"
    out.mkdir()
    write_with_end(tokenizer, im_end(tokenizer), out)
    assert json.loads((out / "generation_config.json").read_text()) == own | dict(eos_token_id=ends)
