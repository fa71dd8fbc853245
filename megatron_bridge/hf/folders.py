"""A new Hugging Face model folder: complete under its name, or absent.

config.json  tokenizer files  model-00001.safetensors …  model.safetensors.index.json  manifest.json  SHA256SUMS
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.data.checksums import list_checksums, sync_files
from pipeline.data.files import fsync_directory, is_temporary, temporary_name
from pipeline.data.run_directory import unfenced
from pipeline.errors import EvenKeelError, ModelError

COMPANION_FILES = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    "generation_config.json",
)
_STALE_S = 24 * 3600.0


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name `target` when the block ends well, and is removed when it does not.

    Raises ModelError when `target` is taken, before the block or after it. What processes left behind that were killed
    a day ago or more is removed here; a younger one may still be at work, here or on another host.
    """
    check_free(target)
    for stale in target.parent.glob(f".{target.name}.*"):
        if is_temporary(stale.name) and time.time() - _last_written(stale) > _STALE_S:
            shutil.rmtree(stale, ignore_errors=True)
    temporary = temporary_name(target)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        list_checksums(temporary)
        _sync_tree(temporary)
        check_free(target)
        temporary.rename(target)  # fails where files appeared since the check
        fsync_directory(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free(target: Path) -> None:
    """Raise ModelError unless `target` does not exist or is an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} exists and is not an empty folder; remove it or name another one")


def replace_folder(temporary: Path, target: Path, fence: Callable[[], None] = unfenced) -> None:
    """List the checksums of a folder's files, make it durable and give it the name `target`, whatever has that name
    now. `fence` is called before that; it raises where this process may write no more."""
    list_checksums(temporary)
    _sync_tree(temporary)
    try:
        fence()
    except EvenKeelError:
        shutil.rmtree(temporary, ignore_errors=True)  # what gets no name must not fill the disk
        raise
    # Folders cannot be replaced in one step: the old one steps aside first.
    aside = temporary_name(target)
    if target.exists():
        target.rename(aside)
    temporary.rename(target)
    fsync_directory(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def complete_folder(
    folder: Path,
    source: Path,
    hf_config: Mapping[str, Any],
    manifest: Mapping[str, Mapping[str, Any]],
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """Add what a folder of shards still lacks: index, manifest, config.json, and the tokenizer files of `source`.

    `quantization` is the `quantization_config` of the new config.json; None leaves that of `hf_config`, if it has one.
    """
    index = {
        "metadata": {"total_size": sum(entry["bytes"] for entry in manifest.values())},
        "weight_map": {name: entry["file"] for name, entry in manifest.items()},
    }
    _write_json(folder / "model.safetensors.index.json", index)
    write_manifest(folder, manifest)
    stored = {} if quantization is None else {"quantization_config": quantization}
    describe_folder(folder, source, {**hf_config, **stored}, manifest["model.norm.weight"]["dtype"])


def write_manifest(folder: Path, manifest: Mapping[str, Mapping[str, Any]]) -> None:
    """Say what the tensors of a folder are (shard_writer.Manifest)."""
    _write_json(folder / "manifest.json", {"tensors": manifest})


def describe_folder(folder: Path, source: Path, hf_config: Mapping[str, Any], dtype: str) -> None:
    """Add config.json for weights of `dtype` (as torch names it), and the tokenizer and generation files of `source`
    that the folder does not have yet.

    `torch_dtype`, the older name of config.json's `dtype`, is left out.
    """
    kept = {key: value for key, value in hf_config.items() if key != "torch_dtype"}
    _write_json(folder / "config.json", kept | {"dtype": dtype})
    for path in sorted({path for pattern in COMPANION_FILES for path in source.glob(pattern)}):
        if path.is_file() and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _sync_tree(folder: Path) -> None:
    """Make every file of a folder durable."""
    sync_files([*folder.rglob("*"), folder])


def _last_written(folder: Path) -> float:
    """When something in the folder was last written, in seconds since 1970; infinite once it is gone."""
    with suppress(FileNotFoundError):
        return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    return math.inf
