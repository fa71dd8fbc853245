"""The protocols that the two loops are written against; adapters implement them, `launch` composes them.

    collector ── Engines ──▶ rollout_sglang.fleet
    learner   ── Learner ──▶ megatron_bridge.learner
    learner   ── WeightChannel ──▶ megatron_bridge.publish (which moves weights through Engines.load)

The tensors inside `Scored` stay with the adapter that made them: the loops only pass it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.records import Batch, Completion


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an engine samples. `top_k` of -1 means the whole vocabulary."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The no-grad pass over a batch at the weights before the update.

    `statistics` are global (the same on every rank): ess, k3_kl, ratio_max … of the whole step;
    `histogram` counts tokens by log-ratio, bins of precision.ratios.
    """

    statistics: dict[str, float]
    histogram: list[float]
    local: Any = field(default=None, repr=False)
    """Whatever the adapter wants back in `update`; never read by the loops."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step: what it measured, the same on every rank."""

    metrics: dict[str, float]
    """loss, grad_norm, lr, entropy, num_tokens, padding_share, the objective's sums as means, ratio statistics."""
    histogram: list[float]
    """As in Scored."""
    logprobs: NDArray[np.float32] = field(repr=False)
    """[responses] the learner's log-probabilities at the weights before the step, in the batch's order."""


class Learner(Protocol):
    """The trained policy. Every method is collective: all ranks call it, in the same order."""

    @property
    def speaks(self) -> bool:
        """True on the one rank that writes metrics and events."""
        ...

    def logprobs(self, batch: Batch) -> Scored:
        """Score the batch at the present weights, without gradients."""
        ...

    def update(self, batch: Batch, advantages: NDArray[np.float32], scored: Scored | None) -> Update:
        """One optimizer step; `advantages` is [samples] or [responses].

        Raises NonFiniteError, before anything is changed, when loss or gradient is not finite.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write model, optimizer and RNG state into an empty directory (no commit marker: the caller's business)."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, whatever layout wrote it."""
        ...

    def export(self, directory: Path) -> None:
        """Write the weights as a full-precision HF safetensors folder with config, tokenizer and manifest.json."""
        ...

    def barrier(self) -> None:
        """Wait for every rank."""
        ...


class WeightChannel(Protocol):
    """Moves the learner's weights to every engine. Collective."""

    def publish(self, version: int) -> dict[str, float]:
        """Returns once the engines serve `version`; seconds of each phase (export_s, pause_s, load_s, verify_s)."""
        ...


class Engines(Protocol):
    """The sampling servers."""

    async def generate(self, prompt: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]:
        """Sample `num_samples` completions of one prompt. Raises RetryableError when no engine could answer."""
        ...

    async def load(self, version: int, directory: Path) -> dict[str, float]:
        """Give every reachable engine the weights of `directory` under the name `version` and verify that it serves
        them; quarantine those that fail. Raises EngineUnavailableError when no engine is left. Returns seconds."""
        ...

    async def heal(self, version: int, directory: Path) -> None:
        """Re-feed engines that came back with another version than the published one."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
