"""A learner whose weights are a hash of everything that it was trained on, and the channel that publishes them.

Two such learners have equal weights if, and only if, they were trained on the same batches, in the same order, with the
same advantages and the same old log-probabilities.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bridge.hf.folders import replace_folder
from pipeline.data.batch import Batch
from pipeline.data.batch_format import arrays_of
from pipeline.data.files import temporary_name
from pipeline.data.run_directory import RunDirectory, numbered_folders, unfenced
from pipeline.ports.learner import Update
from rollout_sglang.weights.update_lease import Updates
from tests.chaos.simulation.engines import EngineRoom, SimulatedFleet
from tests.chaos.simulation.world import Process, World, run_loop
from tests.support.one_rank import OneRank

Floats = NDArray[np.float32]


class HashLearner(OneRank):
    """Stand for the learner on one rank."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._draw = world.random(f"learner {world.me().name}")
        self.weights = hashlib.sha256(b"initial").hexdigest()

    def score(self, batch: Batch) -> Tensor:
        seed = hashlib.sha256(f"{self.weights} {batch.index}".encode()).digest()
        draw = np.random.Generator(np.random.Philox(key=np.frombuffer(seed[:16], "<u8")))
        self._spend(0.05)
        return torch.from_numpy(-draw.random(batch.num_response_tokens, np.float32))

    def update(
        self,
        batch: Batch,
        advantages: Floats,
        scored: Tensor | None,
        *,
        old_logprobs: Tensor | None = None,
        trained: NDArray[np.bool_] | None = None,
        lr_factor: float = 1.0,
    ) -> Update:
        before = self.score(batch)
        digest = hashlib.sha256(f"{self.weights} {batch.index} {lr_factor}".encode())
        for array in (*arrays_of(batch).values(), advantages, scored, old_logprobs, trained):
            digest.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
        self._spend(0.2)
        self._world.point("update", f"batch {batch.index}")
        self.weights = digest.hexdigest()
        metrics = dict(loss=0.0, entropy=float(-before.mean()), num_tokens=float(len(before)))
        return Update(metrics=metrics, histogram=[1.0], device_logprobs=before)

    def save(self, directory: Path) -> None:
        (directory / "model").mkdir()
        (directory / "model" / "shard.bin").write_text(self.weights)
        self._spend(0.05)
        (directory / "rng.json").write_text(json.dumps(dict(weights=self.weights)))

    def load(self, directory: Path) -> None:
        self.weights = (directory / "model" / "shard.bin").read_text()
        assert json.loads((directory / "rng.json").read_text())["weights"] == self.weights, "a mixed checkpoint"

    def export(self, directory: Path, fence: Callable[[], None] = unfenced) -> None:
        write_policy(self.weights, directory, fence)

    def _spend(self, mean_s: float) -> None:
        time.sleep(self._draw.expovariate(1 / mean_s))


def write_policy(weights: str, target: Path, fence: Callable[[], None]) -> None:
    """A policy folder, by the product's own way to give folders their names."""
    temporary = temporary_name(target)
    temporary.mkdir(parents=True)
    (temporary / "model.safetensors").write_text(weights)
    (temporary / "manifest.json").write_text(json.dumps(dict(tensors=dict(all=weights))))
    replace_folder(temporary, target, fence)


class SimulatedChannel:
    """Implements pipeline.ports.weights.WeightChannel, in the order of the disk channel or of a streamed one."""

    def __init__(
        self,
        room: EngineRoom,
        run: RunDirectory,
        learner: HashLearner,
        updates: Updates,
        asked: Callable[[int], None],
        announced: Callable[[int], None],
    ) -> None:
        """`asked` and `announced` are told a version before engines are given it, and when it is published."""
        self._asked, self._announced = asked, announced
        self._room, self._run, self._learner, self._updates = room, run, learner, updates
        self._owner = room.world.me()
        self._delivery: Process | None = None
        """Gives a version to the engines, for as long as its learner lives."""
        self._seconds: dict[str, float] = {}
        self._writer: Process | None = None
        """Writes the folder of a streamed version in the background, for as long as its learner lives."""

    def publish(self, version: int) -> dict[str, float]:
        self.begin(version)
        return self.finish()

    def begin(self, version: int, *, learner_waits: bool = False) -> None:
        world = self._room.world
        world.point("publish", str(version))
        self._asked(version)
        self.wait_for_folder()
        weights = self._learner.weights
        if not world.plan.streamed:
            write_policy(weights, self._run.policy_directory(version), self._run.fence)

        def deliver(_: Process) -> int:
            self._deliver(version, weights)
            return 0

        self._delivery = world.start("delivery", deliver, 0.0, self._owner.host, self._owner)

    def is_over(self, wait_s: float) -> bool:
        ends = time.monotonic() + wait_s
        while (running := self._delivery is not None and self._delivery.status is None) and time.monotonic() < ends:
            time.sleep(0.05)
        return not running

    def finish(self) -> dict[str, float]:
        delivery, self._delivery = self._delivery, None
        if delivery is None:
            return {}
        while delivery.status is None:
            time.sleep(0.05)
        if isinstance(delivery.error, Exception):
            raise delivery.error
        return dict(self._seconds)

    def _deliver(self, version: int, weights: str) -> None:
        world = self._room.world
        world.point("deliver", str(version))
        fleet = SimulatedFleet(self._room, self._run, self._updates)
        folder = self._run.policy_directory(version)
        if world.plan.streamed:
            folder = self._run.policies  # the tensors come over the network: no folder is read
        seconds = run_loop(world, fleet.load(version, folder))
        self._run.set_published(version)
        self._announced(version)
        if world.plan.streamed:
            self._begin_folder(version, weights)
        self._prune(version)
        self._seconds = seconds | {"publish_s": 0.5}

    def wait_for_folder(self) -> None:
        while self._writer is not None and self._writer.status is None:
            time.sleep(0.05)
        if self._writer is not None and isinstance(self._writer.error, Exception):
            raise self._writer.error
        self._writer = None

    def _begin_folder(self, version: int, weights: str) -> None:
        def write(writer: Process) -> int:
            write_policy(weights, self._run.policy_directory(version), self._run.fence)
            return 0

        world = self._room.world
        self._writer = world.start("writer", write, self._room.draw.expovariate(1.0), self._owner.host, self._owner)

    def close(self) -> None:
        self.wait_for_folder()

    def _prune(self, published: int) -> None:
        """As megatron_bridge.weight_sync.disk.prune, which needs torch."""
        import shutil

        older = [version for version in numbered_folders(self._run.policies) if version < published]
        for version in older[: max(0, len(older) - self._room.world.plan.keep_policies)]:
            shutil.rmtree(self._run.policy_directory(version))


def seed_policy(run: RunDirectory) -> None:
    """As launch.run.preflight.seed_policy."""
    if not run.is_published():
        write_policy("initial", run.policy_directory(0), run.fence)
        run.set_published(0)
