"""The learner's own older versions, for log-probabilities at the version that sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from pipeline.data.batch import Batch
from precision.torch_on_use import Tensor

FOLDER = "versions"
"""Within a checkpoint."""


class KeptVersions(Protocol):
    """As many older versions as the schedule has lag; implemented by megatron_bridge.step.kept_versions. Every method
    is collective."""

    def keep(self, version: int) -> None:
        """Copy the present weights, which are those of `version`; called before they change."""
        ...

    def logprobs(self, batch: Batch) -> Tensor | None:
        """[responses] natural log, of each sampled token at the version that sampled it; None where all are of the
        present version. Raises StoreError for a version that is not kept."""
        ...

    def save(self, folder: Path) -> None:
        """Write every copy below `folder`, which need not exist."""
        ...

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; nothing where it wrote nothing."""
        ...
