"""Random models of the sizes that checks need, made once a call and shared by them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from launch.convert.new_model import DEFAULT_CHARACTERS, new_model
from tests.gpu.check import Scale

SIZES = {
    "1.7b": dict(hidden=2048, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=6144),
    "0.6b": dict(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=3072),
    "32b-layers": dict(hidden=5120, layers=4, heads=64, kv_heads=8, head_dim=128, ffn=25_600),
    "tiny": dict(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=64, ffn=384),
}
"""Qwen3's shapes, with tied embeddings; `tiny` for rehearsals. Sizes are multiples of 128: fp8_block needs that."""
VOCABULARY = {"32b-layers": 8192}
"""Of Qwen3, 151,936, but where a few layers stand for all: there it has the LM head's share of the whole model, 2 %."""
FIRST_CHARACTER = 0x10000
"""Above the surrogates: so many characters in a row can be encoded."""


def shared_model(scale: Scale, size: str) -> Path:
    """The folder of a random Qwen3 in bfloat16 with a vocabulary of which every id is a character, so that what
    a random model says can be decoded (rehearsal: tiny, with few characters)."""
    size = scale.of(size, "tiny")
    folder = scale.folder.parent / "models" / size
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        making = folder.with_name(f"{size}.{os.getpid()}")
        # The tokenizer adds its special tokens; the vocabulary is then rounded up to a multiple of 16.
        count = VOCABULARY.get(size, 151_936) - 8
        characters = "".join(chr(FIRST_CHARACTER + i) for i in range(count)) if size != "tiny" else DEFAULT_CHARACTERS
        new_model(making, **SIZES[size], characters=characters, tie=True, dtype="bfloat16")
        with suppress(OSError):  # another lane was first
            making.rename(folder)
    return folder
