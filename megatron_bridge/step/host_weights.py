"""Weights in host memory: a copy of this rank's share of them, put into the model for one scoring pass. The reference
policy is one such copy; older versions of the policy are others (kept_versions).

A swap moves one parameter at a time: the model's goes to the host, the reference's into its place. So the device never
holds more than one parameter twice, the host one copy of the share, and what comes back is what was there, bit for bit.
Model, layout, precision and emulated formats are those of training: the log-ratio of equal weights is exactly 0, in
every layout. Expert replay too: both take the engine's experts where a batch has them.
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
    """A copy of the model's weights in host memory."""

    def __init__(self, learner: MegatronLearner) -> None:
        """Those that the model has now."""
        self._learner = learner
        self._parameters = [parameter for chunk in learner.model for parameter in chunk.module.parameters()]
        memory = PinnedMemory(learner.device.type == "cuda")
        self._copies = [memory.empty(parameter.shape, parameter.dtype) for parameter in self._parameters]
        self.take()

    def take(self) -> None:
        """Copy those that the model has now, in the place of what was copied."""
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            copy.copy_(parameter.detach())

    def read_from(self, folder: Path) -> None:
        """Read those of an HF folder of the learner's own model. Collective. Raises ModelError for another model's."""
        self.take()  # the policy, while the folder is read into its place
        try:
            load_hf([chunk.module for chunk in self._learner.model], self._learner.model_config, folder)
        finally:
            self._swap()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has these weights for a while."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            own = parameter.detach().to("cpu", copy=True)
            parameter.copy_(copy)
            copy.copy_(own)
        weights_changed(self._learner.emulation)


class ReferencePolicy:
    """Weights of an HF folder, of the learner's own model. Every method is collective."""

    def __init__(self, learner: MegatronLearner, folder: Path) -> None:
        """Reads the folder. Raises ModelError for one of another model."""
        self._learner = learner
        self._weights = HostWeights(learner)
        self._weights.read_from(folder)

    def logprobs(self, batch: Batch) -> NDArray[np.float32]:
        """[responses] natural log-probability of every response token at the reference's weights."""
        with self._weights.in_place():
            return self._learner.logprobs(batch)


class KeptVersions:
    """As many older versions as the schedule has lag. Every method is collective."""

    def __init__(self, learner: MegatronLearner, *, lag: int) -> None:
        """Keeps `lag` versions, at least 1."""
        self._learner = learner
        self._lag = lag
        self._kept: dict[int, HostWeights] = {}

    def keep(self, version: int) -> None:
        """Copy the present weights, which are those of `version`; called before they change."""
        room = None
        while len(self._kept) >= self._lag:  # more where a fork has less lag than its run
            room = self._kept.pop(min(self._kept))
        self._kept[version] = room or HostWeights(self._learner)
        if room is not None:
            room.take()

    def logprobs(self, batch: Batch) -> Tensor | None:
        """[responses] on the learner's device, of each sampled token at the version that sampled it, 0 for others; None
        where all are of the present version. Raises StoreError for a version that is not kept."""
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
        """Write every copy below `folder`, which need not exist."""
        for version, weights in self._kept.items():
            with weights.in_place():
                self._learner.export(folder / numbered(version))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; nothing where it wrote nothing."""
        self._kept.clear()
        for version in self._learner.tell(lambda: list(numbered_folders(folder)) if folder.is_dir() else []):
            weights = self._kept[version] = HostWeights(self._learner)
            weights.read_from(folder / numbered(version))


BLOCK_BYTES = 1 << 30
_ALIGNED = 512
"""Bytes at whose multiples tensors begin, as torch's own allocators do."""


@dataclass
class PinnedMemory:
    """Hands out tensors; their memory is one with this object's. `pinned` false, where there is no GPU: plain ones."""

    pinned: bool
    block_bytes: int = BLOCK_BYTES
    _blocks: list[Tensor] = field(default_factory=list)
    _used: list[int] = field(default_factory=list)
    """Of each block, from its beginning."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of undefined values."""
        if not self.pinned:
            return torch.empty(tuple(shape), dtype=dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        block = 0  # the first with so much left; a new one where none has
        while block < len(self._blocks) and len(self._blocks[block]) - self._used[block] < num_bytes:
            block += 1
        if block == len(self._blocks):
            size = max(self.block_bytes, 1 << (num_bytes - 1).bit_length())
            self._blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
            self._used.append(0)
        begin = self._used[block]
        self._used[block] = -(-(begin + num_bytes) // _ALIGNED) * _ALIGNED
        return self._blocks[block][begin : begin + num_bytes].view(dtype).view(tuple(shape))

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return sum(map(len, self._blocks))


@contextmanager
def changed(learner: MegatronLearner, change: Callable[[NamedTensors], NamedTensors]) -> Iterator[None]:
    """Score with `change(learner.named_weights())`; weights are restored bit by bit at the end. Collective.

    Every rank holds its share twice meanwhile, and of the whole model the tensor that is being changed. For `logprobs`
    and `score_tokens` only: an update inside would be lost. Formats that are emulated inside
    (megatron_bridge.step.fp8_emulation) are those of the changed weights.
    """
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
    """A change: the weights of `module`, and of all below it, times `factor`. Norms are left as they are."""

    def change(tensors: NamedTensors) -> NamedTensors:
        for name, tensor in tensors:
            inside = name.removesuffix(".weight") == module or name.startswith(f"{module}.")
            yield name, tensor * factor if inside and tensor.dim() > 1 else tensor

    return change


def rounded(module: str, dtype: torch.dtype) -> Callable[[NamedTensors], NamedTensors]:
    """A change: the weights of `module` as a coarser `dtype` holds them."""

    def change(tensors: NamedTensors) -> NamedTensors:
        for name, tensor in tensors:
            yield name, tensor.to(dtype).to(tensor.dtype) if name == f"{module}.weight" else tensor

    return change


def row_scorer(learner: MegatronLearner, rows: TokenRows) -> Callable[[QuantMap | None], Tensor]:
    """`score(quant_map)` → [tokens] float64, nats: the predicted tokens of each row, one row after another, with the
    map's formats emulated (None, or a map of no modules: without).

    Collective at every call: all ranks must ask for the same maps in the same order. Scores are the same on all ranks,
    so that what is decided from them is. Raises as `emulated`.
    """

    def score(quant_map: QuantMap | None) -> Tensor:
        # None is plain scoring also in a learner that trains with formats emulated.
        with emulated(learner, quant_map if quant_map is not None and quant_map.formats else None):
            return learner.score_rows(rows).logprobs.double().cpu()

    return score
