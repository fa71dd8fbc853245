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

from pipeline.data.membership import Member
from pipeline.ports.coming_check import ComingCheck
from pipeline.ports.weight_check import WeightCheck


class WeightChannel(Protocol):
    """Moves the learner's weights to every engine. Collective.

    The learner waits for `publish`. Or it goes on after `begin`, and calls `finish` before it begins the next version,
    or waits for a folder. One that is asked to end may leave without: the next start publishes again.
    """

    def publish(self, version: int) -> dict[str, float]:
        """Give the weights to the engines; returns once they serve `version`.

        Rank 0 gets measurements by name, the other ranks nothing. A name in `_s` is the seconds of a phase (publish_s:
        of all phases), a name in `_bytes` is a number of bytes.
        """
        ...

    def begin(self, version: int, *, learner_waits: bool = False) -> None:
        """Take the weights as they are now; they go to the engines while the caller changes its own. With
        `learner_waits` it waits instead, and engines may be paused at once."""
        ...

    def is_over(self, wait_s: float) -> bool:
        """Whether `finish` would return or raise at once; waits no longer than `wait_s` for that. Not collective: asked
        on rank 0."""
        ...

    def finish(self) -> dict[str, float]:
        """Wait until the engines serve what was begun; measured as `publish` says. Raises on every rank what failed.
        {} when nothing was begun."""
        ...

    def wait_for_folder(self) -> None:
        """Returns once the policy folder of the last published version is complete.

        A checkpoint of a later step waits for this: a learner that goes on from that checkpoint has later weights, and
        could not write the folder again.
        """
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
    """Which engines have failed in an update so far, and what was measured."""

    failures: Mapping[int, str]
    """Engine → why."""
    measured: Mapping[str, float]
    """Named as WeightChannel.publish names them."""
    number: int = 0
    """Of the update: every sender gives it with each call, and an engine refuses what was overtaken."""
    engines: Sequence[Member] = ()
    """Those that the update is for, as they were when it began."""
    staging: Sequence[int] = ()
    """Those of them that serve on, and take the weights when the update ends."""


class WeightUpdateSession(Protocol):
    """The engines as receivers of tensors. One process begins and ends the update of all engines; in between, every
    sender attends it and asks its own engines to receive. Not collective. A process awaits all methods on one event
    loop."""

    def url(self, engine: int) -> str:
        """Where an engine of the update listens."""
        ...

    @property
    def ranks_per_engine(self) -> int:
        """How many ranks of an engine join a process group."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether this process has begun an update and not ended it."""
        ...

    async def begin_weight_update(self, *, serving: bool = False) -> WeightUpdateReport:
        """Take the next number, pause every engine and make it ready for new weights. From now on an engine claims no
        version, until it is verified that it holds what it was sent. With `serving`, engines that can are not paused
        before the end of the update, and keep their version until then; the report names them."""
        ...

    def attend(self, number: int, engines: Sequence[Member], staging: Sequence[int] = ()) -> None:
        """Send as part of the update that another process has begun, in which some engines are `staging`."""
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
        self, version: int, directory: Path, check: WeightCheck | ComingCheck | None, failures: Mapping[int, str]
    ) -> WeightUpdateReport:
        """Verify that the engines that took everything hold `version`, and admit them. Quarantine those named in
        `failures` and those that fail now. The update has ended then. The report names all that failed. Engines work
        while parts of the check have yet to come.

        `directory` is where the weights lie, now or soon, for engines that come back later.
        """
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
