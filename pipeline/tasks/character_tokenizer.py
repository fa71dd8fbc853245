"""Writes the tokenizer of a small model: one token a character, a few KB, loadable by transformers and by engines."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"


def write_character_tokenizer(folder: Path, characters: str) -> None:
    """Write tokenizer.json and tokenizer_config.json: id 0 pads, id 1 ends, then `characters` in their order.

    There is no unknown token: a character that is not listed is an error when it is encoded, never dropped.
    Raises ValueError when a character comes twice or there is none.
    """
    if not characters or len(set(characters)) != len(characters):
        twice = sorted({c for c in characters if characters.count(c) > 1})
        raise ValueError(f"characters are {characters!r}, expected at least one and none twice (twice: {twice})")
    vocabulary = {token: id for id, token in enumerate((PAD_TOKEN, END_TOKEN, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    # Without a split the whole text would be one word; `[\s\S]` also takes line ends.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(PAD_TOKEN, special=True), AddedToken(END_TOKEN, special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD_TOKEN,
        "eos_token": END_TOKEN,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
