"""The tensors that one learner rank sends, byte for byte as they were published last: what the next version is compared
with.

Every rank of a pipeline stage has the gathered tensors of the stage, so they are divided among its ranks. Each keeps
its share in the memory of its host: the published bytes of the stage ÷ its ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge.hf.shard_writer import Manifest, manifest_entry, whole_tensors, write_shards
from megatron_bridge.hf.tensor_specs import spec_of
from pipeline.data.deltas import Bytes, DeltaWriter

_EXPERTS = ".experts"


class PublishedShare:
    """One rank's share."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._sha256: dict[str, str] = {}

    def take(self, stream: Iterable[tuple[str, Tensor]], writer: DeltaWriter | None) -> None:
        """Take the tensors of the next version, in the formats that are published. `writer` gets what changed of those
        that were published last; without one these do not matter."""
        for name, tensor in stream:
            new = tensor.detach().to("cpu", copy=True).contiguous()
            old = self._tensors.get(name)
            if writer is None or old is None or writer.add(name, _bytes_of(old), _bytes_of(new), new.itemsize):
                self._sha256[name] = hashlib.sha256(_bytes_of(new).data).hexdigest()
            self._tensors[name] = new

    def arrays(self) -> dict[str, Bytes]:
        """The bytes of every tensor."""
        return {name: _bytes_of(tensor) for name, tensor in self._tensors.items()}

    def width(self, name: str) -> int:
        """Bytes of one number of a tensor."""
        return self._tensors[name].itemsize

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def num_numbers(self) -> int:
        """Of all tensors."""
        return sum(tensor.numel() for tensor in self._tensors.values())

    def manifest(self) -> Manifest:
        """Every tensor, for a folder that holds only what changed."""
        specs = {name: spec_of(name, tensor) for name, tensor in self._tensors.items()}
        return {name: manifest_entry(spec, "", self._sha256[name]) for name, spec in specs.items()}

    def write_whole(self, folder: Path, rank: int) -> Manifest:
        """Write every tensor, as `model-rank00002-…`."""
        return write_shards(whole_tensors(self._tensors.items()), folder, prefix=f"model-rank{rank:05}")


def share_of(names: Sequence[str], shapes: Mapping[str, Sequence[int]], rank: int, num_ranks: int) -> frozenset[str]:
    """Which tensors of a stage a rank of it sends, the same division on every rank: what an engine stacks into one
    parameter stays together, and each such group goes to whoever has least so far."""
    groups: dict[str, list[str]] = {}
    for name in names:
        module = name.rpartition(".")[0].rpartition(".")[0]
        groups.setdefault(module.partition(_EXPERTS)[0], []).append(name)
    sizes = {group: sum(math.prod(shapes[name]) for name in members) for group, members in groups.items()}
    loads, mine = [0] * num_ranks, list[str]()
    for group in sorted(groups, key=lambda one: (-sizes[one], one)):
        least = loads.index(min(loads))
        loads[least] += sizes[group]
        mine += groups[group] if least == rank else []
    return frozenset(mine)


def _bytes_of(tensor: Tensor) -> Bytes:
    return tensor.flatten().view(torch.uint8).numpy()
