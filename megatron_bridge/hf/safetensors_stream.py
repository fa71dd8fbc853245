"""Safetensors read and written piece by piece, so that no whole tensor and no whole file need be in memory.

The library maps files into memory, where every page that was read counts as resident until the file is closed; plain
reads do not. The format is eight bytes of header length (little endian), a JSON header
`{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, then the values of all tensors without gaps.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megatron_bridge.hf.headers import tensor_headers, weight_files
from pipeline.errors import ModelError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

PIECE_BYTES = 4 << 20
"""What is read at once, at most (a single row may be larger): a few times this fits into a CPU's cache."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one tensor, and how many bytes that is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Place:
    file: Path
    start: int
    spec: TensorSpec


class TensorFolder:
    """The tensors of a model folder, read by rows. Raises ModelError for a damaged folder."""

    def __init__(self, folder: Path) -> None:
        tensor_headers(folder)  # the library's own checks: sizes, overlaps, truncation
        self._places = {place.spec.name: place for file in weight_files(folder) for place in _places(file)}

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Every tensor by name, in the order of the files."""
        return {name: place.spec for name, place in self._places.items()}

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Rows first … first + count - 1 of a tensor, as a tensor of its own."""
        place = self._places[name]
        shape = place.spec.shape
        row_bytes = math.prod(shape[1:]) * place.spec.dtype.itemsize
        data = bytearray(count * row_bytes)
        with place.file.open("rb") as file:
            file.seek(place.start + first * row_bytes)
            if file.readinto(data) != len(data):
                raise ModelError(f"{place.file} ended inside {name}; fetch the model again")
        if not data:
            return torch.empty((count, *shape[1:]), dtype=place.spec.dtype)
        return torch.frombuffer(data, dtype=place.spec.dtype).reshape(count, *shape[1:])

    def whole(self, name: str) -> Tensor:
        """A tensor as it was stored."""
        shape = self._places[name].spec.shape
        return self.rows(name, 0, shape[0]) if shape else self._scalar(name)

    def pieces(self, name: str, multiple: int = 1, piece_bytes: int = PIECE_BYTES) -> Iterator[Tensor]:
        """A tensor in runs of whole rows: a multiple of `multiple` (but for the last), about `piece_bytes` each."""
        spec = self._places[name].spec
        if not spec.shape:
            yield self._scalar(name)
            return
        row_bytes = max(1, spec.nbytes // max(1, spec.shape[0]))
        step = max(1, piece_bytes // row_bytes // multiple) * multiple
        for first in range(0, max(1, spec.shape[0]), step):  # an empty tensor is one empty piece
            yield self.rows(name, first, min(step, spec.shape[0] - first))

    def _scalar(self, name: str) -> Tensor:
        place = self._places[name]
        with place.file.open("rb") as file:
            file.seek(place.start)
            return torch.frombuffer(bytearray(file.read(place.spec.nbytes)), dtype=place.spec.dtype).reshape(())


class ShardWriter:
    """One safetensors file whose tensors are known beforehand and are filled in any order, piece after piece."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self.path = path
        self._next: dict[str, int] = {}
        self._end: dict[str, int] = {}
        self._digests = {spec.name: hashlib.sha256() for spec in specs}
        offset = 0
        for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):  # wide types first: all are aligned
            end = offset + spec.nbytes
            header[spec.name] = dict(dtype=NAMES[spec.dtype], shape=list(spec.shape), data_offsets=[offset, end])
            self._next[spec.name], self._end[spec.name] = offset, end
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._begin = 8 + len(text)
        self._file: BinaryIO = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._begin + offset)

    def write(self, name: str, piece: Tensor) -> None:
        """Append a CPU piece to the tensor `name`."""
        data = piece.contiguous().flatten().view(torch.uint8).numpy().data
        if self._next[name] + data.nbytes > self._end[name]:
            raise ValueError(f"{name} is full: {data.nbytes} bytes too many; plan the file with its real shape")
        self._file.seek(self._begin + self._next[name])
        self._file.write(data)
        self._digests[name].update(data)
        self._next[name] += data.nbytes

    def close(self) -> dict[str, str]:
        """name → sha256 of what was written. Raises ValueError when a tensor is not complete."""
        incomplete = [name for name, end in self._end.items() if self._next[name] != end]
        if incomplete:
            raise ValueError(f"{self.path} lacks values of {', '.join(incomplete[:4])}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    def abandon(self) -> None:
        """Close the file without checking it; for use after a failure."""
        self._file.close()


def plan_shards(groups: Sequence[Sequence[TensorSpec]], shard_bytes: int) -> list[list[TensorSpec]]:
    """Deal groups of tensors that belong together into files of at most `shard_bytes` (one group may be larger)."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for group in groups:
        group_bytes = sum(spec.nbytes for spec in group)
        if shards[-1] and size + group_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].extend(group)
        size += group_bytes
    return shards


def digest(folder: TensorFolder, name: str) -> str:
    """sha256 of a tensor's bytes, read from disk piece by piece."""
    sha = hashlib.sha256()
    for piece in folder.pieces(name):
        sha.update(piece.flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _places(file: Path) -> Iterator[_Place]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ModelError(f"{file}: {name} is {entry['dtype']}, expected one of {', '.join(DTYPES)}")
        spec = TensorSpec(name, tuple(entry["shape"]), dtype)
        yield _Place(file, 8 + length + entry["data_offsets"][0], spec)
