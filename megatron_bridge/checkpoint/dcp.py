"""Read a Megatron distributed checkpoint (torch_dist) tensor by tensor, and as HF tensors, without model or groups.

`.metadata` locates each tensor's boxes in the `*.distcp` files. It is a pickle, so only the classes of such an index
are let through; boxes and other objects are read with `weights_only=True`.
"""

from __future__ import annotations

import enum
import importlib
import io
import math
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.hf.model_config import MEGATRON_ENDS, MEGATRON_EXPERT, MEGATRON_LAYER, ModelConfig
from pipeline.data.files import machine_failure
from pipeline.errors import CorruptCheckpointError
from precision.text import one_line, quoted

INDEX_FILE = ".metadata"
_MOST = 2**62
_FILE_NAME = re.compile(r"[\w.-]+\.distcp")

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
    # Megatron-Core also keeps the save's plans in the index; they are not read.
    "torch.distributed.checkpoint.planner": frozenset({"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "pathlib": frozenset({"PosixPath"}),
}


@dataclass(frozen=True)
class _Place:
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class _Box:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: _Place


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint: its whole shape and the boxes that it was written in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[_Box, ...]


class CheckpointIndex:
    """The tensors of a checkpoint folder, by Megatron's names. Raises CorruptCheckpointError for a damaged folder, and
    OSError if the machine fails to read it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors, self._objects = _read(directory)
        ends: dict[str, int] = {}
        boxes = (box.place for stored in self.tensors.values() for box in stored.boxes)
        for place in (*boxes, *self._objects.values()):
            ends[place.file] = max(ends.get(place.file, 0), place.start + place.num_bytes)
        for name, end in ends.items():
            path = directory / name
            found = path.stat().st_size if path.is_file() else 0
            if found < end:
                raise CorruptCheckpointError(
                    f"{path} has {found} bytes, its index needs {end}; copy the checkpoint again or use another one"
                )

    def read(self, name: str, lead: tuple[int, ...] = ()) -> Tensor:
        """Return tensor `name`, at the indices `lead` of its first dimensions, on the CPU."""
        stored = self.tensors[name]
        shape = stored.shape[len(lead) :]
        boxes = list(stored.boxes)
        for axis, at in enumerate(lead):
            boxes = [box for box in boxes if box.offsets[axis] <= at < box.offsets[axis] + box.sizes[axis]]
        held = sum(math.prod(box.sizes[len(lead) :]) for box in boxes)
        if held != math.prod(shape):  # checked before memory is allocated for values that no file holds
            raise CorruptCheckpointError(
                f"{self.directory}: the boxes of {name} hold {held} of its {math.prod(shape)} values; save it again"
            )
        result = torch.empty(shape, dtype=stored.dtype)
        for box in boxes:
            part = self._load(box.place)
            if not isinstance(part, Tensor) or tuple(part.shape) != box.sizes or part.dtype != stored.dtype:
                raise CorruptCheckpointError(
                    f"{self.directory / box.place.file} holds something else than its index says at byte "
                    f"{box.place.start}"
                )
            for index, at in zip(lead, box.offsets, strict=False):
                part = part[index - at]
            place = tuple(slice(at, at + size) for at, size in zip(box.offsets[len(lead) :], part.shape, strict=True))
            result[place] = part
        return result

    def read_object(self, name: str) -> Any:
        """Return an object that is not a tensor: numbers, strings, tensors, and lists and dicts of them."""
        if name not in self._objects:
            raise CorruptCheckpointError(f"{self.directory} holds no {quoted(name)}; use another checkpoint")
        return self._load(self._objects[name])

    def _load(self, place: _Place) -> Any:
        path = self.directory / place.file
        try:
            with path.open("rb") as file:
                file.seek(place.start)
                return torch.load(io.BytesIO(file.read(place.num_bytes)), map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        except Exception as error:
            if machine_failure(error) is not None:
                raise
            raise CorruptCheckpointError(
                f"{path} is damaged at byte {place.start} ({one_line(error, 200)}); use another checkpoint"
            ) from error


class _IndexUnpickler(pickle.Unpickler):  # noqa: S301 (it finds only what is allowed)
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        found = getattr(importlib.import_module(module), name, None) if module in _ALLOWED else None
        if name in _ALLOWED.get(module, ()) or (module == "torch" and isinstance(found, torch.dtype)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into the index of a checkpoint")


def _enum_member(kind: Any, name: Any) -> Any:
    """Return an enumeration's member: some Python releases (3.11.2) pickle a member as getattr(class, name)."""
    if isinstance(kind, enum.EnumMeta) and isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(
        f"getattr({quoted(kind)}, {quoted(name)}) does not belong into the index of a checkpoint"
    )


def _read(directory: Path) -> tuple[dict[str, StoredTensor], dict[str, _Place]]:
    """Return the tensors, and the places of other objects, by name."""
    path = directory / INDEX_FILE
    try:
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        places = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        tensors, objects = dict[str, StoredTensor](), dict[str, _Place]()
        for name, entry in metadata.state_dict_metadata.items():
            if not hasattr(entry, "chunks"):
                objects[name] = _place(places[name, ()])
                continue
            dtype, shape, boxes = entry.properties.dtype, _numbers(entry.size), []
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"a dtype is {quoted(dtype)}")
            for chunk in entry.chunks:
                place = _place(places[name, tuple(chunk.offsets)])
                box = _Box(_numbers(chunk.offsets), _numbers(chunk.sizes), place)
                ends = (at + size for at, size in zip(box.offsets, box.sizes, strict=True))
                if len(box.sizes) != len(shape) or any(end > whole for end, whole in zip(ends, shape, strict=True)):
                    raise ValueError(f"a box of {box.sizes} at {box.offsets} is not within {shape}")
                if math.prod(box.sizes) * dtype.itemsize > place.num_bytes:
                    raise ValueError(f"a box of {box.sizes} has {place.num_bytes} bytes")
                boxes.append(box)
            tensors[name] = StoredTensor(shape=shape, dtype=dtype, boxes=tuple(boxes))
        return tensors, objects
    except FileNotFoundError:
        raise CorruptCheckpointError(
            f"{directory} has no {INDEX_FILE}: it is no distributed checkpoint; name the folder that was saved"
        ) from None
    except Exception as error:  # a damaged pickle raises errors of any type, also MemoryError
        if machine_failure(error) is not None:
            raise
        raise CorruptCheckpointError(
            f"{path} is not the index of a distributed checkpoint ({type(error).__name__}: {one_line(error, 200)}); "
            "use another checkpoint"
        ) from error


def _place(info: Any) -> _Place:
    name = info.relative_path
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or info.transform_descriptors:
        raise ValueError(f"unexpected storage of a value: {quoted(info)}")
    return _Place(name, *_numbers((info.offset, info.length)))


def _numbers(values: Any) -> tuple[int, ...]:
    found = tuple(values)
    if not all(isinstance(value, int) and 0 <= value < _MOST for value in found):
        raise ValueError(f"sizes or places are {quoted(found)}")
    return found


_MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.")

_VOCABULARY = (MEGATRON_ENDS["embedding.word_embeddings.weight"], MEGATRON_ENDS["output_layer.weight"])


@dataclass(frozen=True)
class Source:
    """The source of the HF tensors `names`: `key`, at the indices `lead` of its first dimensions."""

    key: str
    lead: tuple[int, ...]
    names: tuple[str, ...]


def find_sources(directory: Path, stored: Mapping[str, StoredTensor], config: ModelConfig) -> list[Source]:
    """Return the sources of the model's HF tensors, each tensor exactly once, in layer order. Raises
    CorruptCheckpointError naming tensors that are missing, misshaped, or not part of the model."""
    tensors = config.tensors()
    problems: list[str] = []
    sources: list[Source] = []
    used: dict[str, int] = {}
    """Key → number of layers taken from it."""
    for keys, names in _wanted(config):
        if any(name not in tensors for name in names):
            continue  # not part of this architecture
        source = None
        for key, lead in keys:
            if key in stored and all(i < size for i, size in zip(lead, stored[key].shape, strict=False)):
                source = Source(key, lead, names)
                break
        if source is None:
            problems.append(f"{keys[0][0]} is missing ({', '.join(names)})")
            continue
        sources.append(source)
        used[source.key] = max(used.get(source.key, 0), source.lead[0] + 1 if source.lead else 0)
        expected = (sum(tensors[name][0] for name in names), *tensors[names[0]][1:])
        found = stored[source.key].shape[len(source.lead) :]
        if names[0] in _VOCABULARY and found[:1] > expected[:1]:
            found = (expected[0], *found[1:])  # tensor parallel learners pad the vocabulary
        if found != expected:
            problems.append(f"{source.key} has shape {list(found)}, expected {list(expected)} ({', '.join(names)})")
    problems += [f"{key} is not part of it" for key in stored if key.startswith(_MODEL_PREFIXES) and key not in used]
    for key, count in used.items():
        # Only a stack can hide a layer too many; a numbered layer shows up by name.
        if count and not key.split(".")[2].isdigit() and stored[key].shape[0] != config.num_layers:
            problems.append(f"{key} stacks {stored[key].shape[0]} layers, expected {config.num_layers}")
    if problems:
        shown = "; ".join(dict.fromkeys(problems[:5])) + (f"; and {len(problems) - 5} more" if problems[5:] else "")
        raise CorruptCheckpointError(
            f"{directory} does not hold the {config.architecture} that its config.json describes: {shown}; "
            "give the checkpoint of this model"
        )
    return sources


def stream_hf_tensors(index: CheckpointIndex, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield every HF tensor of a checkpoint by name, in its stored dtype, with one of Megatron's tensors in memory."""
    for source in find_sources(index.directory, index.tensors, config):
        tensor, names = index.read(source.key, source.lead), source.names
        if len(names) == 3:
            # [kv heads × (query heads of each + key + value) × head_dim, …]
            group = config.num_heads // config.num_kv_heads
            heads = tensor.reshape(config.num_kv_heads, group + 2, config.head_dim, *tensor.shape[1:])
            parts = (heads[:, :group], heads[:, group : group + 1], heads[:, group + 1 :])
            yield from zip(names, (part.reshape(-1, *tensor.shape[1:]) for part in parts), strict=True)
        elif len(names) == 2:
            yield from zip(names, tensor.chunk(2), strict=True)
        else:
            yield names[0], tensor[: config.vocab_size] if names[0] in _VOCABULARY else tensor


def stored_dtype(index: CheckpointIndex) -> torch.dtype:
    """Return the dtype of the model's weights. Raises CorruptCheckpointError if there are several."""
    kinds = {entry.dtype for name, entry in index.tensors.items() if name.startswith(_MODEL_PREFIXES)}
    if len(kinds) != 1:
        raise CorruptCheckpointError(
            f"{index.directory} holds weights of {len(kinds)} dtypes ({', '.join(sorted(map(str, kinds)))}), expected "
            "one; give a checkpoint that this program wrote"
        )
    return kinds.pop()


def _wanted(config: ModelConfig) -> Iterator[tuple[list[tuple[str, tuple[int, ...]]], tuple[str, ...]]]:
    """Yield ([(key, lead) of each possible place], HF names)."""
    yield [("embedding.word_embeddings.weight", ())], (MEGATRON_ENDS["embedding.word_embeddings.weight"],)
    num_experts = 0 if config.experts is None else config.experts.count
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for suffixes, names in MEGATRON_LAYER:
            yield _places(suffixes, layer, ()), tuple(prefix + name for name in names)
        for expert in range(num_experts):
            for suffix, names in MEGATRON_EXPERT.items():
                places = _places((f"mlp.experts.experts.{suffix}",), layer, (expert,))
                yield places, tuple(f"{prefix}mlp.experts.{expert}.{name}" for name in names)
    for key in ("decoder.final_layernorm.weight", "output_layer.weight"):
        yield [(key, ())], (MEGATRON_ENDS[key],)


def _places(suffixes: tuple[str, ...], layer: int, expert: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Return both possible places: layers that are all alike are stacked, others are numbered."""
    stacked = [(f"decoder.layers.{suffix}", (layer, *expert)) for suffix in suffixes]
    return stacked + [(f"decoder.layers.{layer}.{suffix}", expert) for suffix in suffixes]
