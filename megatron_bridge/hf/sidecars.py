"""What a Hugging Face model folder holds beside its weights, and how it is made durable."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.data.run_directory import fsync_directory

COMPANION_FILES = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    "generation_config.json",
)


def copy_companions(source: Path, folder: Path) -> None:
    """Copy tokenizer and generation files."""
    for path in sorted({path for pattern in COMPANION_FILES for path in source.glob(pattern)}):
        shutil.copyfile(path, folder / path.name)


def write_index(folder: Path, manifest: Mapping[str, Mapping[str, Any]]) -> None:
    """model.safetensors.index.json, from name → file, bytes."""
    index = {
        "metadata": {"total_size": sum(entry["bytes"] for entry in manifest.values())},
        "weight_map": {name: entry["file"] for name, entry in manifest.items()},
    }
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Not durable by itself: see `sync_tree`."""
    path.write_text(json.dumps(value, indent=1) + "\n")


def sync_tree(folder: Path) -> None:
    """Make every file of a folder durable."""
    for path in folder.rglob("*"):
        if path.is_dir():
            fsync_directory(path)
            continue
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    fsync_directory(folder)
