"""The port of the collector to the sampling servers: implemented by `rollout_sglang.fleet`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batch import Completion
from pipeline.data.routed_experts import ExpertShape
from pipeline.ports.weights import WeightCheck


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an engine samples. `top_k` of -1 means the whole vocabulary; with `kept_set`, as many of its likeliest tokens
    as an engine can name (pipeline.config.sections.MOST_KEPT)."""

    max_new_tokens: int
    vocab_size: int | None = None
    """Of the model: ids lie below it. None: the caller does not know it."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    experts: ExpertShape | None = None
    """Of a mixture whose engines say which experts each token went to; None: they are not asked."""
    kept_set: bool = False
    """Whether engines say which tokens top_p and top_k left; log-probabilities are then renormalized over them."""

    @property
    def asks_for_records(self) -> bool:
        """Whether an answer must hold more than tokens and log-probabilities."""
        return self.kept_set or self.experts is not None


class Engines(Protocol):
    """The sampling servers."""

    async def generate(self, prompt: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]:
        """Sample `num_samples` completions of one prompt. Raises RetryableError when no engine could answer."""
        ...

    async def load(self, version: int, directory: Path, check: WeightCheck | None = None) -> dict[str, float]:
        """Give every reachable engine the weights of `directory` as `version`, and verify that it holds them, by
        `check` or else by the one in the folder. Engines that fail twice are quarantined.

        Returns seconds (`…_s`) and, with a probe, probe_gap_nats. Raises EngineUnavailableError when no engine is left.
        """
        ...

    async def resync(self, version: int, directory: Path) -> None:
        """Give the published `version`, which lies in `directory`, to engines that came back with another one."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class Teacher(Protocol):
    """A model that scores tokens which it did not sample."""

    async def logprobs(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """For each response to `prompt`, [tokens] natural log-probabilities at temperature 1. Raises RetryableError
        when no server could answer."""
        ...
