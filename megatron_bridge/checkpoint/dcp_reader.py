"""Reads a Megatron distributed checkpoint (torch_dist) tensor by tensor, without a model or process groups.

`.metadata` says which boxes of each tensor lie where in the `*.distcp` files. It is a pickle, so only the classes that
such an index is made of are let through; the boxes themselves are read with `weights_only=True`.
"""

from __future__ import annotations

import importlib
import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import CorruptCheckpointError

INDEX_FILE = ".metadata"

_ALLOWED = {
    "torch": frozenset({"Size"}),
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    # Megatron-Core keeps the plans of the save in the index as well; they are not read.
    "torch.distributed.checkpoint.planner": frozenset({"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "pathlib": frozenset({"PosixPath"}),
}


@dataclass(frozen=True)
class _Box:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the checkpoint: its whole shape, and the boxes that it was written in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[_Box, ...]


class CheckpointIndex:
    """The tensors of a checkpoint folder, by Megatron's names. Raises CorruptCheckpointError for a damaged folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors = _read(directory)
        self._check_files()

    def read(self, name: str, lead: tuple[int, ...] = ()) -> Tensor:
        """Tensor `name`, at the indices `lead` of its first dimensions, on the CPU."""
        stored = self.tensors[name]
        result = torch.empty(stored.shape[len(lead) :], dtype=stored.dtype)
        filled = 0
        for box in stored.boxes:
            inside = all(at <= i < at + size for i, at, size in zip(lead, box.offsets, box.sizes, strict=False))
            if inside:
                part = self._load(box)
                for index, at in zip(lead, box.offsets, strict=False):
                    part = part[index - at]
                offsets = box.offsets[len(lead) :]
                place = tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))
                result[place] = part
                filled += part.numel()
        if filled != result.numel():
            raise CorruptCheckpointError(
                f"{self.directory}: the boxes of {name} hold {filled} of its {result.numel()} values; save it again"
            )
        return result

    def _load(self, box: _Box) -> Tensor:
        path = self.directory / box.file
        try:
            with path.open("rb") as file:
                file.seek(box.start)
                tensor = torch.load(io.BytesIO(file.read(box.num_bytes)), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CorruptCheckpointError(
                f"{path} is damaged at byte {box.start} ({' '.join(str(error).split())[:200]}); use another checkpoint"
            ) from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != box.sizes:
            raise CorruptCheckpointError(f"{path} holds something else than its index says at byte {box.start}")
        return tensor

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for stored in self.tensors.values():
            for box in stored.boxes:
                ends[box.file] = max(ends.get(box.file, 0), box.start + box.num_bytes)
        for name, end in ends.items():
            path = self.directory / name
            found = path.stat().st_size if path.is_file() else 0
            if found < end:
                raise CorruptCheckpointError(
                    f"{path} has {found} bytes, its index needs {end}; copy the checkpoint again or use another one"
                )


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = getattr(importlib.import_module(module), name, None) if module in _ALLOWED else None
        if name in _ALLOWED.get(module, ()) or (module == "torch" and isinstance(found, torch.dtype)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into the index of a checkpoint")


def _read(directory: Path) -> dict[str, StoredTensor]:
    path = directory / INDEX_FILE
    try:
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        places = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        return {
            name: StoredTensor(
                shape=tuple(entry.size),
                dtype=entry.properties.dtype,
                boxes=tuple(_box(chunk, places[name, tuple(chunk.offsets)]) for chunk in entry.chunks),
            )
            for name, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "chunks")
        }
    except FileNotFoundError:
        raise CorruptCheckpointError(
            f"{directory} has no {INDEX_FILE}: it is no distributed checkpoint; name the folder that was saved"
        ) from None
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(
            f"{path} is not the index of a distributed checkpoint ({' '.join(str(error).split())[:200]}); "
            "use another checkpoint"
        ) from error


def _box(chunk: Any, info: Any) -> _Box:
    if "/" in info.relative_path or info.transform_descriptors:
        raise ValueError(f"unexpected storage of a box: {info}")
    return _Box(tuple(chunk.offsets), tuple(chunk.sizes), info.relative_path, info.offset, info.length)
