"""Read and write the tensors of a model folder in pieces, so that no whole tensor or file need be in memory."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_bridge.hf.headers import DTYPES, FLOATS, tensor_headers
from pipeline.errors import ModelError
from pipeline.ports.weights import TensorSpec

PIECE_BYTES = 4 << 20
"""Most bytes of one read (a single row may be larger): a few of them fit into a CPU's cache."""
REOPEN_BYTES = 32 << 20
"""Bytes read before a file is reopened. The library maps files into memory, where read pages count as resident until
the file is closed. Opening a file for every slice would parse its header as often."""


class TensorFolder:
    """The tensors of a model folder. Raises ModelError for a damaged folder. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._headers = tensor_headers(folder)
        for name, header in self._headers.items():
            if header.dtype not in DTYPES:
                raise ModelError(f"{header.file}: {name} is {header.dtype}, expected one of {', '.join(DTYPES)}")
        self.specs = {
            name: TensorSpec(name=name, dtype=DTYPES[header.dtype], shape=header.shape)
            for name, header in self._headers.items()
        }
        """Every tensor by name, ordered by file, then by tensor."""
        self._path: Path | None = None
        self._file: Any = None
        self._num_read = 0

    def slice(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Read part of a tensor of at least one dimension. It may share memory with the file: do not write to it."""
        file = self._open(self._headers[name].file)
        tensor: Tensor = file.get_slice(name)[index]
        return self._read(name, tensor)

    def whole(self, name: str) -> Tensor:
        """Read a tensor. It may share memory with the file: do not write to it."""
        tensor: Tensor = self._open(self._headers[name].file).get_tensor(name)
        return self._read(name, tensor)

    def _read(self, name: str, tensor: Tensor) -> Tensor:
        """Count the bytes of `tensor` and return it. Raises ModelError if a value is not finite."""
        self._num_read += tensor.nbytes
        if self._headers[name].dtype in FLOATS and tensor.numel():
            ends = torch.stack(torch.aminmax(tensor.detach()))  # one pass; NaN wins
            if not ends.isfinite().all():
                raise ModelError(
                    f"{self._headers[name].file}: {name} holds values that are not finite (nan or inf); fetch the "
                    "model again, or take an earlier checkpoint of it"
                )
        return tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Read all tensors by name, in the order of `specs`."""
        return ((name, self.whole(name)) for name in self.specs)

    def pieces(self, name: str, multiple: int = 1, piece_bytes: int = PIECE_BYTES) -> Iterator[Tensor]:
        """Read a tensor in runs of about `piece_bytes`, each a multiple of `multiple` rows (but for the last)."""
        spec = self.specs[name]
        if not math.prod(spec.shape) or not spec.shape:
            yield self.whole(name)
            return
        num_rows = spec.shape[0]
        step = max(1, piece_bytes * num_rows // num_bytes(spec) // multiple) * multiple
        for first in range(0, num_rows, step):
            yield self.slice(name, (slice(first, min(first + step, num_rows)),))

    def digest(self, name: str) -> str:
        """Return the sha256 of a tensor's bytes."""
        sha = hashlib.sha256()
        for piece in self.pieces(name):
            sha.update(piece.flatten().view(torch.uint8).numpy().data)
        return sha.hexdigest()

    def _open(self, path: Path) -> Any:
        if path != self._path or self._num_read >= REOPEN_BYTES:
            self._file = None
            try:
                self._file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} changed while it was read ({error}); fetch the model again") from error
            self._path, self._num_read = path, 0
        return self._file


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def num_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * torch_dtype(spec).itemsize


SHARD_BYTES = 4 << 30
"""Most bytes of tensors in one file (one tensor may be larger)."""
HEADER_BYTES = 64 << 10
"""Offset of the values in every file. Such a header has room for about 500 tensors; then a new file begins."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Manifest = dict[str, dict[str, Any]]
"""Tensor name → file, shape, dtype (as torch names it), bytes and sha256 of its values in C order."""
Pieces = tuple[TensorSpec, Iterable[Tensor]]
"""A tensor's spec, and its values in runs of whole rows."""


def whole_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Pieces]:
    """Yield whole tensors as `write_shards` takes them."""
    for name, tensor in named_tensors:
        yield spec_of(name, tensor), (tensor,)


def write_shards(
    tensors: Iterable[Pieces],
    folder: Path,
    *,
    prefix: str = "model",
    shard_bytes: int = SHARD_BYTES,
    advance: Callable[[int], None] | None = None,
) -> Manifest:
    """Write the tensors as `<prefix>-00001.safetensors` …, in order; return their manifest. All pieces of a tensor are
    taken, and copied from their device, before the next tensor is requested. `advance` gets the bytes of each piece.
    Nothing is synced. Raises ValueError for pieces that do not match their spec."""
    manifest: Manifest = {}
    shard: _Shard | None = None
    count, hasher = 0, ThreadPoolExecutor(1, "shard-hash")
    try:
        for spec, pieces in tensors:
            if shard is None or not shard.has_room(spec, shard_bytes):
                if shard is not None:
                    shard.close()
                count += 1
                shard = _Shard(folder / f"{prefix}-{count:05}.safetensors")
            manifest[spec.name] = shard.append(spec, pieces, advance, hasher)
        if shard is not None:
            shard.close()
    except BaseException:
        if shard is not None:
            with suppress(OSError):  # the first failure is raised
                shard.file.close()
        raise
    finally:
        hasher.shutdown()
    return manifest


class _Shard:
    """A file to which tensors are appended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.file = path.open("wb")
        self.file.seek(HEADER_BYTES)
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._header_bytes = len(json.dumps(self._header))
        self._num_bytes = 0

    def has_room(self, spec: TensorSpec, shard_bytes: int) -> bool:
        """Return whether the file has room for a tensor, which must start at a multiple of its element size."""
        return (
            self._num_bytes + num_bytes(spec) <= shard_bytes
            and self._num_bytes % torch_dtype(spec).itemsize == 0
            and self._header_bytes + len(json.dumps({spec.name: self._entry(spec)})) <= HEADER_BYTES - 8
        )

    def append(
        self, spec: TensorSpec, pieces: Iterable[Tensor], advance: Callable[[int], None] | None, hasher: Executor
    ) -> dict[str, Any]:
        """Write a tensor, while `hasher` hashes it: each takes about as long. Returns its entry in the manifest."""
        entry, sha, written = self._entry(spec), hashlib.sha256(), 0
        for piece in pieces:
            if piece.dtype is not torch_dtype(spec):
                raise ValueError(f"a piece of {spec.name} is {piece.dtype}, expected {spec.dtype}; plan its real dtype")
            data = piece.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().data
            hashed = hasher.submit(sha.update, data)
            self.file.write(data)
            hashed.result()  # before the caller may change the piece
            written += data.nbytes
            if advance is not None:
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
        with self.file:
            self.file.seek(0)
            self.file.write(len(header).to_bytes(8, "little") + header)

    def _entry(self, spec: TensorSpec) -> dict[str, Any]:
        offsets = [self._num_bytes, self._num_bytes + num_bytes(spec)]
        return dict(dtype=_NAMES[spec.dtype], shape=list(spec.shape), data_offsets=offsets)


def manifest_entry(spec: TensorSpec, file: str, sha256: str) -> dict[str, Any]:
    return dict(file=file, shape=list(spec.shape), dtype=spec.dtype, bytes=num_bytes(spec), sha256=sha256)


def check_written(folder: Path, manifest: Manifest, advance: Callable[[int], None]) -> None:
    """Compare a folder on disk with the manifest of what was written, headers and bytes. Raises ModelError."""
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
