"""The protocols that the two loops are written against; adapters implement them, `launch` composes them.

collector ── Engines ──▶ rollout_sglang.fleet
learner   ── Learner ──▶ megatron_bridge.learner
learner   ── WeightChannel ──▶ megatron_bridge.publish (which moves weights through Engines.load)
                               megatron_bridge.streamed (through EngineFeed, over a wire)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.proof import Proof
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
    logprobs: NDArray[np.float32] = field(repr=False)
    """[responses] natural log, in the batch's order; where a token was forced it means nothing."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step: what it measured, the same on every rank."""

    metrics: dict[str, float]
    """loss, grad_norm, lr, entropy, num_tokens, padding_share, the objective's sums as means, ratio statistics."""
    histogram: list[float]
    """As in Scored."""
    logprobs: NDArray[np.float32] = field(repr=False)
    """[responses] the learner's log-probabilities at the weights before the step, in the batch's order; NaN where the
    step did not look."""


class Learner(Protocol):
    """The trained policy. Every method is collective: all ranks call it, in the same order."""

    @property
    def speaks(self) -> bool:
        """True on the one rank that writes metrics and events."""
        ...

    def logprobs(self, batch: Batch) -> Scored:
        """Score the batch at the present weights, without gradients."""
        ...

    def update(
        self,
        batch: Batch,
        advantages: NDArray[np.float32],
        scored: Scored | None,
        *,
        proximal: NDArray[np.float32] | None = None,
        trained: NDArray[np.bool_] | None = None,
    ) -> Update:
        """One optimizer step; `advantages` is [samples] or [responses].

        `proximal` are the learner's log-probabilities [responses] when the batch's stage began, by default those of
        `scored`. `trained` [samples] names the samples that are run through the model, by default all; the others still
        count in the denominators.

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
        """Returns once the engines serve `version`; measurements by name, on the speaking rank only: names in `_s` are
        seconds of a phase (publish_s: all of it), names in `_bytes` are bytes."""
        ...

    def settle(self) -> None:
        """Returns once the policy folder of the last published version is complete. A checkpoint must not overtake it:
        from there the folder could not be made again."""
        ...

    def close(self) -> None:
        """Release connections and shared memory; the engines go on. Not collective."""
        ...


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor on its way to an engine: HF name, torch's name of the dtype (`bfloat16`), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A process group that a sender (rank 0) opens for one engine, whose ranks join it as 1, 2, …"""

    group: str
    address: str
    port: int
    backend: Literal["gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class FeedReport:
    """Which engines fell out of a publish so far, and what was measured."""

    failures: Mapping[int, str]
    """Engine → why."""
    measured: Mapping[str, float]
    """Named as WeightChannel.publish names them."""


class EngineFeed(Protocol):
    """The engines as receivers of tensors. One process opens and closes a publish; in between, every sender asks its
    own engines to receive. Not collective; every method is awaited on one event loop of its process."""

    @property
    def urls(self) -> Sequence[str]:
        """Engine i listens at urls[i]."""
        ...

    @property
    def ranks_per_engine(self) -> int:
        """How many ranks of an engine join a process group."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether this process has opened a publish and not closed it."""
        ...

    async def open_feed(self) -> FeedReport:
        """Keep other feeders out, pause every engine and make it ready for new weights. From now on, and until it
        proves what it was sent, no engine claims to serve any version."""
        ...

    async def join(self, engine: int, meeting: Meeting, deadline_s: float) -> None:
        """The engine's ranks join the process group. Raises RetryableError."""
        ...

    async def is_member(self, engine: int, group: str) -> bool:
        """Whether the engine still has the group: one that was restarted has not. Raises RetryableError."""
        ...

    async def leave(self, engine: int, group: str) -> None:
        """The engine forgets a group that its sender gave up, if it still answers."""
        ...

    async def receive(self, engine: int, group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        """The engine takes part in one broadcast of these tensors, flattened to bytes one after the other, and loads
        them. Raises RetryableError."""
        ...

    async def receive_shared(self, engine: int, bucket: bytes, deadline_s: float) -> None:
        """The engine opens memory of the calling process and loads the tensors in it; when it answers, it has let go of
        that memory. `bucket` is a pickle that SGLang's own unpickler accepts (megatron_bridge.shared_wire). Raises
        RetryableError."""
        ...

    async def close_feed(
        self, version: int, directory: Path, proof: Proof | None, failures: Mapping[int, str]
    ) -> FeedReport:
        """Have the engines that took everything prove that they hold `version`, and admit them; quarantine those named
        in `failures` and those that fail now; let other feeders in. The report names all that failed.

        `directory` is where the weights lie, now or soon, for engines that come back later."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class Engines(Protocol):
    """The sampling servers."""

    async def generate(self, prompt: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]:
        """Sample `num_samples` completions of one prompt. Raises RetryableError when no engine could answer."""
        ...

    async def load(self, version: int, directory: Path, proof: Proof | None = None) -> dict[str, float]:
        """Give every reachable engine the weights of `directory` under the name `version` and have it prove that it
        holds them (`proof`, or the one in the folder); quarantine those that fail twice. Raises EngineUnavailableError
        when no engine is left. Returns seconds (`…_s`) and, with a probe, probe_gap_nats."""
        ...

    async def heal(self, version: int, directory: Path) -> None:
        """Re-feed engines that came back with another version than the published one."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
