"""How weights get from the learner to the engines: what the learner loop calls, and what the engines offer to a sender.

learner loop ── WeightChannel ──▶ megatron_bridge.weight_sync.disk (through Engines.load)
                                  megatron_bridge.weight_sync.streaming (through WeightUpdateSession, over a transport)
WeightUpdateSession is implemented by rollout_sglang.weights.weight_update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pipeline.ports.weight_check import WeightCheck


class WeightChannel(Protocol):
    """Moves the learner's weights to every engine. Collective."""

    def publish(self, version: int) -> dict[str, float]:
        """Returns once the engines serve `version`; measurements by name, on the speaking rank only: names in `_s` are
        seconds of a phase (publish_s: all of it), names in `_bytes` are bytes."""
        ...

    def wait_for_folder(self) -> None:
        """Returns once the policy folder of the last published version is complete. A checkpoint must not overtake it:
        from there the folder could not be made again."""
        ...

    def close(self) -> None:
        """Release connections and shared memory; the engines go on. Not collective."""
        ...


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor in a file or on its way to an engine: HF name, torch's name of the dtype (`bfloat16`), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ProcessGroupSpec:
    """A process group that a sender (rank 0) opens for one engine, whose ranks join it as 1, 2, …"""

    group: str
    address: str
    port: int
    backend: Literal["gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class WeightUpdateReport:
    """Which engines fell out of a publish so far, and what was measured."""

    failures: Mapping[int, str]
    """Engine → why."""
    measured: Mapping[str, float]
    """Named as WeightChannel.publish names them."""


class WeightUpdateSession(Protocol):
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

    async def begin_weight_update(self) -> WeightUpdateReport:
        """Keep other feeders out, pause every engine and make it ready for new weights. From now on, and until it
        proves what it was sent, no engine claims to serve any version."""
        ...

    async def join(self, engine: int, group_spec: ProcessGroupSpec, deadline_s: float) -> None:
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
        that memory. `bucket` is a pickle that SGLang's own unpickler accepts
        (megatron_bridge.weight_sync.ipc_transport). Raises RetryableError."""
        ...

    async def end_weight_update(
        self, version: int, directory: Path, proof: WeightCheck | None, failures: Mapping[int, str]
    ) -> WeightUpdateReport:
        """Have the engines that took everything prove that they hold `version`, and admit them; quarantine those named
        in `failures` and those that fail now; let other feeders in. The report names all that failed.

        `directory` is where the weights lie, now or soon, for engines that come back later."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
