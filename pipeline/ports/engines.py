"""The port of the collector to the sampling servers: implemented by `rollout_sglang.fleet`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.data.records import Completion
from pipeline.ports.weight_check import WeightCheck


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an engine samples. `top_k` of -1 means the whole vocabulary."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


class Engines(Protocol):
    """The sampling servers."""

    async def generate(self, prompt: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]:
        """Sample `num_samples` completions of one prompt. Raises RetryableError when no engine could answer."""
        ...

    async def load(self, version: int, directory: Path, proof: WeightCheck | None = None) -> dict[str, float]:
        """Give every reachable engine the weights of `directory` under the name `version` and have it prove that it
        holds them (`proof`, or the one in the folder); quarantine those that fail twice. Raises EngineUnavailableError
        when no engine is left. Returns seconds (`…_s`) and, with a probe, probe_gap_nats."""
        ...

    async def resync(self, version: int, directory: Path) -> None:
        """Re-feed engines that came back with another version than the published one."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
