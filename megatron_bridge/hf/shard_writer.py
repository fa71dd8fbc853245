"""Writes safetensors files piece by piece, so that no whole tensor need be in memory, and compares them afterwards.

The library writes a file only from whole tensors that are all in memory. The format is eight bytes of header length
(little endian), a JSON header `{name: {"dtype", "shape", "data_offsets": [begin, end]}}` that may end in spaces, then
the values of all tensors without gaps. Here the values are written first, behind room that is left for the header.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.hf.headers import DTYPES
from megatron_bridge.hf.tensor_folder import TensorFolder
from megatron_bridge.hf.tensor_specs import num_bytes, spec_of, torch_dtype
from pipeline.errors import ModelError
from pipeline.ports.weights import TensorSpec

SHARD_BYTES = 4 << 30
"""Bytes of tensors in one file, at most (one tensor may be larger)."""
HEADER_BYTES = 64 << 10
"""Where the values of every file begin; about 500 tensors have room in such a header, then a new file is begun."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Manifest = dict[str, dict[str, Any]]
"""Tensor name → file, shape, dtype (as torch names it), bytes and sha256 of its values in C order."""
Pieces = tuple[TensorSpec, Iterable[Tensor]]
"""A tensor, and its values in runs of whole rows."""


def whole_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Pieces]:
    """Tensors that are whole already, for `write_shards`."""
    for name, tensor in named_tensors:
        yield spec_of(name, tensor), (tensor,)


def write_shards(
    tensors: Iterable[Pieces],
    folder: Path,
    *,
    prefix: str = "model",
    shard_bytes: int = SHARD_BYTES,
    advance: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Write the tensors as `<prefix>-00001.safetensors` …, in their order; returns the manifest of what was written.

    All pieces of a tensor are taken, and copied from their device, before the next tensor is asked for. `advance` is
    told the bytes of each piece. Nothing is synced. Raises ValueError for pieces that are not what their spec says.
    """
    manifest: Manifest = {}
    shard: _Shard | None = None
    count = 0
    try:
        for spec, pieces in tensors:
            if shard is None or not shard.has_room(spec, shard_bytes):
                if shard is not None:
                    shard.close()
                count += 1
                shard = _Shard(folder / f"{prefix}-{count:05}.safetensors")
            manifest[spec.name] = shard.append(spec, pieces, advance)
        if shard is not None:
            shard.close()
    except BaseException:
        if shard is not None:
            shard.abandon()
        raise
    return manifest


class _Shard:
    """One file, to which tensors are appended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._file.seek(HEADER_BYTES)
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._header_bytes = len(json.dumps(self._header))
        self._num_bytes = 0

    def has_room(self, spec: TensorSpec, shard_bytes: int) -> bool:
        """Whether the file may take one more tensor. It must start at a multiple of its width to be read."""
        return (
            self._num_bytes + num_bytes(spec) <= shard_bytes
            and self._num_bytes % torch_dtype(spec).itemsize == 0
            and self._header_bytes + len(json.dumps({spec.name: self._entry(spec)})) <= HEADER_BYTES - 8
        )

    def append(self, spec: TensorSpec, pieces: Iterable[Tensor], advance: Callable[[int], None]) -> dict[str, Any]:
        """Write a tensor; returns its entry in the manifest."""
        entry, sha, written = self._entry(spec), hashlib.sha256(), 0
        for piece in pieces:
            if piece.dtype is not torch_dtype(spec):
                raise ValueError(f"a piece of {spec.name} is {piece.dtype}, expected {spec.dtype}; plan its real dtype")
            data = piece.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().data
            self._file.write(data)
            sha.update(data)
            written += data.nbytes
            advance(data.nbytes)
        if written != num_bytes(spec):
            raise ValueError(f"{spec.name} got {written} bytes, its shape needs {num_bytes(spec)}; pass all its pieces")
        self._header[spec.name] = entry
        self._header_bytes += len(json.dumps({spec.name: entry}))
        self._num_bytes += written
        return manifest_entry(spec, self._path.name, sha.hexdigest())

    def close(self) -> None:
        """Write the header and close the file."""
        header = json.dumps(self._header).encode().ljust(HEADER_BYTES - 8)
        with self._file:
            self._file.seek(0)
            self._file.write(len(header).to_bytes(8, "little") + header)

    def abandon(self) -> None:
        """Close the file as it is. It has failed already, so a further failure says nothing new."""
        with suppress(OSError):
            self._file.close()

    def _entry(self, spec: TensorSpec) -> dict[str, Any]:
        offsets = [self._num_bytes, self._num_bytes + num_bytes(spec)]
        return dict(dtype=_NAMES[spec.dtype], shape=list(spec.shape), data_offsets=offsets)


def manifest_entry(spec: TensorSpec, file: str, sha256: str) -> dict[str, Any]:
    """What a manifest says about a tensor."""
    return dict(file=file, shape=list(spec.shape), dtype=spec.dtype, bytes=num_bytes(spec), sha256=sha256)


def check_written(folder: Path, manifest: Manifest, advance: Callable[[int], None]) -> None:
    """Compare a folder on disk with what was meant to be written, headers and bytes. Raises ModelError."""
    written = TensorFolder(folder)
    problems = [f"{name} is missing" for name in manifest if name not in written.specs]
    for name, spec in written.specs.items():
        expected = manifest.get(name)
        if expected is None:
            problems.append(f"{name} is left over")
        elif manifest_entry(spec, expected["file"], written.digest(name)) != expected:
            problems.append(f"{name} differs from what was written")
        advance(num_bytes(spec))
    if problems:
        raise ModelError(f"{folder} is not what was written: {'; '.join(problems[:5])}; look at the disk, try again")
