"""A new HF folder: complete under its name, or absent.

Weights are written piece by piece into files that were planned beforehand, so that memory holds one piece.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_bridge.hf.safetensors_stream import ShardWriter, TensorFolder, TensorSpec, digest, plan_shards
from megatron_bridge.hf.sidecars import copy_companions, sync_tree, write_index, write_json
from megatron_bridge.hf.writer import SHARD_BYTES
from pipeline.data.run_directory import fsync_directory
from pipeline.errors import ModelError

Manifest = dict[str, dict[str, Any]]


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name `target` when the block ends well, and is removed when it does not.

    Raises ModelError when `target` is taken. What a killed process left behind is removed here.
    """
    check_free(target)
    for stale in target.parent.glob(f"{target.name}.tmp-*"):
        if not _alive(stale.name.rpartition("-")[2]):
            shutil.rmtree(stale, ignore_errors=True)
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_tree(temporary)
        check_free(target)
        temporary.rename(target)  # an empty folder of that name is replaced
        fsync_directory(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free(target: Path) -> None:
    """Raise ModelError unless `target` does not exist or is an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} exists and is not an empty folder; remove it or name another one")


def write_weights(
    folder: Path,
    groups: Sequence[Sequence[TensorSpec]],
    pieces: Iterable[tuple[str, Tensor]],
    *,
    advance: Callable[[int], None],
    shard_bytes: int = SHARD_BYTES,
) -> Manifest:
    """Write shards and their index; returns name → file, shape, dtype, bytes, sha256.

    Tensors of a group share a file; `pieces` must come group by group, in the order of `groups`. `advance` is told the
    bytes of each piece.
    """
    shards = plan_shards(groups, shard_bytes)
    shard_of = {spec.name: number for number, shard in enumerate(shards) for spec in shard}
    manifest: Manifest = {}
    writer: ShardWriter | None = None
    current = -1

    def close() -> None:
        if writer is not None:
            digests = writer.close()
            manifest.update({spec.name: _entry(spec, writer.path.name, digests) for spec in shards[current]})

    try:
        for name, piece in pieces:
            if shard_of[name] != current:
                close()
                current += 1
                writer = ShardWriter(folder / f"model-{current + 1:05}.safetensors", shards[current])
            assert writer is not None
            writer.write(name, piece)
            advance(piece.nbytes)
        close()
    finally:
        if writer is not None:
            writer.abandon()
    write_index(folder, manifest)
    return manifest


def complete_folder(folder: Path, source: Path, config: Mapping[str, Any], manifest: Manifest) -> None:
    """Add config.json, the tokenizer files of `source`, and manifest.json as in a published policy."""
    copy_companions(source, folder)
    write_json(folder / "config.json", config)
    write_json(folder / "manifest.json", {"tensors": manifest})


def check_written(folder: Path, manifest: Manifest, advance: Callable[[int], None]) -> None:
    """Compare a folder on disk with what was meant to be written, headers and bytes. Raises ModelError."""
    written = TensorFolder(folder)
    problems = [f"{name} is missing" for name in manifest if name not in written.specs]
    for name, spec in written.specs.items():
        expected = manifest.get(name)
        if expected is None:
            problems.append(f"{name} is left over")
        elif _entry(spec, expected["file"], {name: digest(written, name)}) != expected:
            problems.append(f"{name} differs from what was written")
        advance(spec.nbytes)
    if problems:
        raise ModelError(f"{folder} is not what was written: {'; '.join(problems[:5])}; look at the disk, try again")


def _entry(spec: TensorSpec, file: str, digests: Mapping[str, str]) -> dict[str, Any]:
    dtype = str(spec.dtype).removeprefix("torch.")
    return dict(file=file, shape=list(spec.shape), dtype=dtype, bytes=spec.nbytes, sha256=digests[spec.name])


def _alive(process: str) -> bool:
    return process.isdigit() and Path(f"/proc/{process}").exists()
