"""Score with other weights than the policy's: older versions, a reference, changed weights, emulated formats.

A `HostWeights` is a copy in host memory. A swap moves one parameter at a time: the model's into a spare on the host,
the copy's into the model; then the copy's memory is the spare for the next parameter of that shape. All copies are
queued on the current stream, between pinned memory and the GPU: nothing is copied within the host, no copy is waited
for, and the policy comes back bit for bit. Model, layout, precision, emulated formats and expert replay are those of
training: the log-ratio of equal weights is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bridge.step.fp8_emulation import emulated, weights_changed
from megatron_bridge.step.micro_batches import TokenRows
from megatron_bridge.weights import load_hf, load_named
from pipeline.data.batch import Batch
from pipeline.data.run_directory import numbered, numbered_folders
from pipeline.errors import StoreError
from precision.formats.quant_map import QuantMap

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner

NamedTensors = Iterator[tuple[str, Tensor]]


class HostWeights:
    """A copy of this rank's share of the weights, in host memory."""

    def __init__(self, learner: MegatronLearner) -> None:
        """Copy the model's present weights."""
        self._learner = learner
        memory = PinnedMemory(learner.device.type == "cuda")
        self._copies = [memory.hold(parameter) for parameter in self._parameters]
        self._spares = {_kind(one): memory.empty(one.shape, one.dtype) for one in self._parameters}
        """Memory for one more parameter of each shape and dtype."""

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter for chunk in self._learner.model for parameter in chunk.module.parameters()]

    def take(self) -> None:
        """Overwrite the copy with the model's present weights."""
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            copy.copy_(parameter.detach(), non_blocking=True)

    def read_from(self, folder: Path) -> None:
        """Read the weights from an HF folder. Collective. Raises ModelError for another model's folder."""
        self.take()  # keeps the policy while the folder is read into the model
        try:
            load_hf([chunk.module for chunk in self._learner.model], self._learner.model_config, folder)
        finally:
            self._swap()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put these weights into the model for the duration of the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for index, parameter in enumerate(self._parameters):
            kind, copy = _kind(parameter), self._copies[index]
            own = self._spares[kind]
            own.copy_(parameter, non_blocking=True)
            parameter.copy_(copy, non_blocking=True)
            self._copies[index], self._spares[kind] = own, copy
        weights_changed(self._learner.emulation)


def _kind(parameter: Tensor) -> tuple[torch.Size, torch.dtype]:
    return parameter.shape, parameter.dtype


class ReferencePolicy:
    """The weights of an HF folder of the learner's model, for scoring. Every method is collective."""

    def __init__(self, learner: MegatronLearner, folder: Path) -> None:
        """Read the folder. Raises ModelError for another model's folder."""
        self._learner = learner
        self._weights = HostWeights(learner)
        self._weights.read_from(folder)

    def logprobs(self, batch: Batch) -> NDArray[np.float32]:
        """Return the log-probability of every response token under the reference policy, float32 [responses]."""
        with self._weights.in_place():
            return self._learner.logprobs(batch)


class KeptVersions:
    """The older policy versions that a schedule with lag needs. Every method is collective."""

    def __init__(self, learner: MegatronLearner, *, lag: int) -> None:
        """Keep up to `lag` versions, at least 1."""
        self._learner = learner
        self._lag = lag
        self._kept: dict[int, HostWeights] = {}

    def keep(self, version: int) -> None:
        """Copy the present weights as those of `version`, before they change."""
        room = None
        while len(self._kept) >= self._lag:  # more than `lag` where a fork has less lag than its parent run
            room = self._kept.pop(min(self._kept))
        self._kept[version] = room or HostWeights(self._learner)
        if room is not None:
            room.take()

    def logprobs(self, batch: Batch) -> Tensor | None:
        """Return each token's log-probability at the version that sampled it, or None if all are of the present
        version. [responses] on the learner's device, 0 for tokens not sampled. Raises StoreError for a lost version."""
        versions = np.unique(batch.policy_version[batch.loss_mask]).tolist()
        if not set(versions) - {batch.index}:
            return None
        found = torch.zeros(batch.num_response_tokens, device=self._learner.device)
        row = np.repeat(np.arange(batch.num_samples), batch.response_lengths)
        for version in versions:
            tokens = batch.loss_mask & (batch.policy_version == version)
            samples = np.bincount(row[tokens], minlength=batch.num_samples) > 0
            if version != batch.index and version not in self._kept:
                raise StoreError(
                    f"batch {batch.index} has tokens that version {version} sampled, but the learner kept the weights "
                    f"of versions {sorted(self._kept)} and {batch.index}; the checkpoint it began from was saved by a "
                    "run that kept none, so go back to an objective without them, or begin another run.name"
                )
            with nullcontext() if version == batch.index else self._kept[version].in_place():
                scored = self._learner.score(batch.select(samples))
            of_part = torch.from_numpy(tokens[samples[row]]).to(scored.device)
            found[torch.from_numpy(tokens).to(found.device)] = scored[of_part]
        return found

    def save(self, folder: Path) -> None:
        """Write every copy below `folder`, which is created if missing."""
        for version, weights in self._kept.items():
            with weights.in_place():
                self._learner.export(folder / numbered(version))

    def load(self, folder: Path) -> None:
        """Read the copies that `save` wrote; keep none if `folder` is missing."""
        self._kept.clear()
        for version in self._learner.tell(lambda: list(numbered_folders(folder)) if folder.is_dir() else []):
            weights = self._kept[version] = HostWeights(self._learner)
            weights.read_from(folder / numbered(version))


BLOCK_BYTES = 1 << 30
_ALIGNED = 512
"""Alignment of the tensors in a block, in bytes, as in torch's allocators."""


def _pinned_block(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


@dataclass
class PinnedMemory:
    """An allocator of tensors of host memory that a GPU copies at full speed, for as long as this object lives or until
    `reuse`. Pinning costs as much time as many copies. With `pinned` False (no GPU) they are plain tensors."""

    pinned: bool
    block_bytes: int = BLOCK_BYTES
    new_block: Callable[[int], Tensor] = _pinned_block
    """Returns uint8 [its argument], a multiple of `block_bytes`."""
    _blocks: list[Tensor] = field(default_factory=list)
    _used: list[int] = field(default_factory=list)
    """Bytes handed out of each block."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor with a storage of its own size, as torch.save expects."""
        if not self.pinned:
            return torch.empty(tuple(shape), dtype=dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        block = 0  # the first block with enough space; a new one if none has
        while block < len(self._blocks) and len(self._blocks[block]) - self._used[block] < num_bytes:
            block += 1
        if block == len(self._blocks):
            self._blocks.append(self.new_block(max(self.block_bytes, 1 << (num_bytes - 1).bit_length())))
            self._used.append(0)
        begin = self._used[block]
        self._used[block] = -(-(begin + num_bytes) // _ALIGNED) * _ALIGNED
        own = torch.from_numpy(self._blocks[block].numpy()[begin : begin + num_bytes])
        return own.view(dtype).view(tuple(shape))

    def hold(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor`. From a GPU it is only queued on the current stream: synchronize before reading."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor.detach(), non_blocking=True)

    def reuse(self) -> None:
        """Take back all memory, which nothing may use anymore, for new tensors."""
        self._used = [0] * len(self._blocks)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._blocks))


@contextmanager
def changed(learner: MegatronLearner, change: Callable[[NamedTensors], NamedTensors]) -> Iterator[None]:
    """Score with the weights that `change(learner.named_weights())` yields; they are restored bit by bit at the end.
    Collective. Every rank holds its share twice meanwhile, and one whole tensor at a time. For `logprobs` and
    `score_tokens` only: an update inside would be lost. Formats emulated inside round the changed weights."""
    chunks = [chunk.module for chunk in learner.model]
    saved = [(parameter, parameter.detach().clone()) for chunk in chunks for parameter in chunk.parameters()]
    try:
        load_named(chunks, learner.model_config, change(learner.named_weights()))
        weights_changed(learner.emulation)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)
        weights_changed(learner.emulation)


def scaled(module: str, factor: float) -> Callable[[NamedTensors], NamedTensors]:
    """Return a change that multiplies the weights of `module` and of the modules below it by `factor`, except norms."""

    def change(tensors: NamedTensors) -> NamedTensors:
        for name, tensor in tensors:
            inside = name.removesuffix(".weight") == module or name.startswith(f"{module}.")
            yield name, tensor * factor if inside and tensor.dim() > 1 else tensor

    return change


def rounded(module: str, dtype: torch.dtype) -> Callable[[NamedTensors], NamedTensors]:
    """Return a change that rounds the weight of `module` to the coarser `dtype`."""

    def change(tensors: NamedTensors) -> NamedTensors:
        for name, tensor in tensors:
            yield name, tensor.to(dtype).to(tensor.dtype) if name == f"{module}.weight" else tensor

    return change


def row_scorer(learner: MegatronLearner, rows: TokenRows) -> Callable[[QuantMap | None], Tensor]:
    """Return `score(quant_map)`, which returns the log-probabilities of the predicted tokens, float64 [tokens], row
    after row, with the map's formats emulated (None or an empty map: none). Every call is collective: all ranks must
    score the same maps in the same order, and get the same scores. Raises as `emulated` does."""

    def score(quant_map: QuantMap | None) -> Tensor:
        # None scores without emulation also in a learner that trains with it.
        with emulated(learner, quant_map if quant_map is not None and quant_map.formats else None):
            return learner.score_rows(rows).logprobs.double().cpu()

    return score
