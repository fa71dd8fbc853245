"""Weights in host memory: a copy of this rank's share of them, put into the model for one scoring pass. The reference
policy is one such copy; older versions of the policy are others (kept_versions).

A swap moves one parameter at a time: the model's goes to the host, the reference's into its place. So the device never
holds more than one parameter twice, the host one copy of the share, and what comes back is what was there, bit for bit.
Model, layout, precision and emulated formats are those of training: the log-ratio of equal weights is exactly 0, in
every layout. Expert replay too: both take the engine's experts where a batch has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_bridge.pinned_memory import PinnedMemory
from megatron_bridge.step.fp8_emulation import weights_changed
from megatron_bridge.weights import convert
from pipeline.data.batch import Batch

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner


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
            convert.load_hf([chunk.module for chunk in self._learner.model], self._learner.model_config, folder)
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
