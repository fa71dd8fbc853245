"""The weights of the last versions of the policy, in host memory, to score a batch at the version that sampled it.

    before each update   the present weights are copied, and the oldest copy is given up
    scoring a batch      for each version that sampled some of its tokens: swap in, score those samples, swap back
    a checkpoint         holds each copy as an HF folder, which any layout reads, so that a resumed run has the same

A copy costs this rank's share of the parameters in host memory, for each version of lag. What is scored at the present
version needs no swap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_bridge.step.reference import HostWeights
from pipeline.data.batch import Batch
from pipeline.data.run_directory import numbered, numbered_folders
from pipeline.errors import StoreError

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner


class KeptVersions:
    """Implements pipeline.trainer.old_logprobs.KeptVersions. Every method is collective."""

    def __init__(self, learner: MegatronLearner, *, lag: int) -> None:
        """Keeps `lag` versions, at least 1."""
        self._learner = learner
        self._lag = lag
        self._kept: dict[int, HostWeights] = {}

    def keep(self, version: int) -> None:
        """Copy the present weights, which are those of `version`."""
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
            with self._weights_of(version, batch.index):
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
        for version in self._learner.tell(lambda: list(_versions(folder))):
            weights = self._kept[version] = HostWeights(self._learner)
            weights.read_from(folder / numbered(version))

    def _weights_of(self, version: int, present: int) -> AbstractContextManager[None]:
        if version == present:
            return nullcontext()
        if version not in self._kept:
            raise StoreError(
                f"batch {present} has tokens that version {version} sampled, but the learner kept the weights of "
                f"versions {sorted(self._kept)} and {present}; the checkpoint it began from was saved by a run that "
                "kept none, so go back to an objective without them, or begin another run.name"
            )
        return self._kept[version].in_place()


def _versions(folder: Path) -> Iterator[int]:
    yield from numbered_folders(folder) if folder.is_dir() else ()
