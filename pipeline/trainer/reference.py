"""Log-probabilities of the reference policy, and the promise that it stays the same one.

The digest of its files is recorded in the run directory when the first learner starts, and compared at every later
start: a folder that was replaced would hold the policy near something else without a word.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.background import tell_when_done
from pipeline.data.batch import Batch
from pipeline.data.checksums import fingerprints, read_sealed_json, write_sealed_json
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RunConflictError
from pipeline.ports.learner import Learner


class Reference(Protocol):
    """A frozen policy; implemented by megatron_bridge.step.reference."""

    def logprobs(self, batch: Batch) -> NDArray[np.float32]:
        """[responses] natural log; collective."""
        ...


def with_reference(reference: Reference | None, batch: Batch) -> Batch:
    """The batch with the reference's log-probabilities; as it is without a reference. Collective."""
    return batch if reference is None else replace(batch, reference_logprobs=reference.logprobs(batch))


def require_same_reference(run: RunDirectory, learner: Learner, folder: Path) -> None:
    """Record the digest of the folder's weights, or compare it. Collective. Raises RunConflictError for other ones."""
    tell_when_done(learner, lambda: _record_or_compare(run, folder))


def _record_or_compare(run: RunDirectory, folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    found = {file.name: one.sha256 for file, one in zip(files, fingerprints(files), strict=True) if one is not None}
    path = run.reference_file
    if not path.exists():
        run.fence()
        write_sealed_json(path, found)
    elif read_sealed_json(path, "put back a copy, or begin another run.name") != found:
        raise RunConflictError(
            f"{folder} holds other weights than the reference that this run began with ({path}); put them back, or "
            "begin another run.name"
        )
