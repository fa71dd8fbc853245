"""What a run has left so far. Everything is read anew at each access, so a run may be looked at while it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.analysis import summary as summaries
from pipeline.analysis.run_log import RunLog, columns, recipes_of
from pipeline.analysis.trajectories import Background, sample_rows, tokenizer_of
from pipeline.config.recipe import Recipe
from pipeline.data.batch import Batch
from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore


@dataclass(frozen=True)
class Run:
    """A run directory, such as runs/demo. Raises StoreError where it is none, and for a file that is damaged."""

    path: Path
    _directory: RunDirectory = field(init=False, repr=False, compare=False)

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", Path(path))
        object.__setattr__(self, "_directory", RunDirectory(self.path))
        recipes_of(self.path)

    @property
    def recipe(self) -> Recipe:
        """The recipe that it goes by now, every default spelled out."""
        return self._directory.recipe()

    @property
    def summary(self) -> dict[str, Any]:
        """Its headline numbers, as `evenkeel runs show --json` prints them."""
        return summaries.summary(self.path)

    @property
    def metrics(self) -> dict[str, NDArray[Any]]:
        """Name → [steps], a row a step; the names are those of docs/metrics.md, parts behind a slash: `seconds/update`.
        `step` is int64, all else float64, NaN where a step has no such number."""
        return columns(read_metrics(self.path), "step")

    @property
    def evaluations(self) -> dict[str, NDArray[Any]]:
        """Name → [evaluated versions], such as `pass_at_1` and `pass_at_k/8`; `version` is int64."""
        return columns(RunLog.read(self.path).evaluations, "version")

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened, by time; docs/file-formats.md has the kinds."""
        return read_events(self.path)

    @property
    def batches(self) -> list[int]:
        """The numbers of the batches that are there, ascending."""
        return BatchStore(self._directory.batches).committed()

    def batch(self, index: int) -> Batch:
        """One batch, verified: flat arrays with offsets. Raises CorruptBatchError, StoreError (it is not there)."""
        return BatchStore(self._directory.batches).read(index, None)

    def learner_logprobs(self, index: int) -> NDArray[np.float32] | None:
        """The learner's log-probabilities of a batch, from before it trained on it: [responses], beside
        `batch(index).rollout_logprobs`. None when it was not trained yet."""
        return self._directory.learner_logprobs(index)

    def samples(self, index: int) -> list[dict[str, Any]]:
        """A mapping a sample: prompt, response and reference answer as text, the data's metadata, reward and its parts,
        advantage, versions, log-ratios."""
        batch = self.batch(index)
        tokenizer = tokenizer_of(self._directory, self.recipe.model.path, batch.contract.tokenizer_sha256)
        return list(sample_rows(batch, tokenizer, Background(self.path), learner_logprobs=self.learner_logprobs(index)))


def list_runs(folder: str | Path = "runs") -> list[Run]:
    """The runs of a folder that can be read, by name. Raises StoreError when it is no folder."""
    return [Run(found["path"]) for found in summaries.list_runs(Path(folder)) if "error" not in found]
