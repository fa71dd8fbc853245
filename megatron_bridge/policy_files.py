"""Writes a policy: a folder that SGLang and transformers load, with a manifest that proves what it holds.

    config.json  tokenizer files  model-00001.safetensors …  model.safetensors.index.json  manifest.json

Written under a temporary name, synced, then renamed: a policy folder is complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from precision.quant_map import QuantMap, quantize_state

SHARD_BYTES = 4 << 30
"""A safetensors file is closed when it has grown beyond this."""

_COPIED = ("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "chat_template*")
_COPIED_SETTINGS = ("generation_config.json",)


def write_policy(
    named_tensors: Iterable[tuple[str, Tensor]],
    source_folder: Path,
    target: Path,
    quant: QuantMap | None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `named_tensors` (HF names, the whole model) as the policy folder `target`, replacing one that is there.

    config.json and the tokenizer come from `source_folder`; `quant` converts weights to the rollout's formats.
    """
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    manifest = _write_shards(_converted(named_tensors, quant), temporary, shard_bytes)
    _write_json(temporary / "manifest.json", {"tensors": manifest})
    _write_json(temporary / "config.json", _config(source_folder, quant))
    for pattern in (*_COPIED, *_COPIED_SETTINGS):
        for path in sorted(source_folder.glob(pattern)):
            shutil.copyfile(path, temporary / path.name)
    for path in temporary.iterdir():
        _sync(path)
    _sync(temporary)
    _replace(temporary, target)


def verify_manifest(folder: Path) -> dict[str, Any]:
    """The manifest's tensors: name → {file, shape, dtype, sha256}."""
    tensors: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["tensors"]
    return tensors


def tensor_digest(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes, contiguous, little-endian."""
    import torch

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file as a whole, surviving a crash at any point."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.write_text(text)
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)
