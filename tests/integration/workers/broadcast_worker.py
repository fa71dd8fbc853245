"""Four learner ranks (TP2×PP2) that broadcast to running engines, while rank 0 breaks an engine between two buckets."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import Layout, initialize
from megatron_bridge.weight_sync.disk import ProbeScorer, WeightCheckPlan
from megatron_bridge.weight_sync.streaming import StreamedChannel
from megatron_bridge.weight_sync.transport import Bucket, ProcessGroupTransport, pack
from pipeline.config.recipe import LearnerSection
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EngineUnavailableError
from pipeline.ports.weights import TensorSpec
from precision.objectives.p3o import P3O
from rollout_sglang.weights.expected_checksums import ExpectedChecksums
from rollout_sglang.weights.weight_update import FleetUpdateSession
from tests.support.fleets import members, settings

ROWS = tuple(tuple((7 * row + 3 * place) % 40 for place in range(24)) for row in range(3))
BUCKET_BYTES = 1 << 18
BREAK_AT = 4
"""Buckets that an engine loads before it is broken."""


class BreakableFleet(FleetUpdateSession):
    """Calls `break_engine` once, when one of its engines is asked for its fifth bucket."""

    break_engine: Callable[[], None] | None = None
    victim = -1
    buckets = 0

    async def receive(self, engine: int, group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        if self.break_engine is not None and engine == self.victim:
            self.buckets += 1
            if self.buckets > BREAK_AT:
                self.break_engine()
                self.break_engine, self.buckets = None, 0
        await super().receive(engine, group, tensors, deadline_s)


class Rank:
    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task
        self.here = dist.get_rank() == 0
        section = LearnerSection(
            precision="fp32",
            tensor_parallel=2,
            pipeline_parallel=2,
            micro_batch_tokens=256,
            step_deadline_s=240,
            data_parallel=1,
        )
        initialize(Layout.of(section), seed=0, deadline_s=240)
        self.learner = MegatronLearner(Path(task["model"]), section, P3O(), temperature=1.0, total_steps=10)
        nbytes = sum(tensor.nbytes for _, tensor in self.learner.named_weights())
        self.found: dict[str, Any] = {"publishes": {}, "nbytes": nbytes}

    def channel(self) -> StreamedChannel:
        config = self.learner.model_config

        def new_checksums() -> ExpectedChecksums:
            return ExpectedChecksums(
                dtype=torch.float32, num_kv_heads=config.num_kv_heads, tied_embeddings=config.tied_embeddings
            )

        self.run = RunDirectory(Path(self.task["out"]) / "run")
        self.fleet = BreakableFleet(
            members(self.run.path, self.task["urls"]),
            **settings(self.run.path, key=self.task["key"]),
            ranks_per_engine=1,
        )
        return StreamedChannel(
            self.learner,
            self.fleet,
            self.run,
            None,
            WeightCheckPlan(rows=ROWS, max_mean_gap_nats=1e-3, new_checksums=new_checksums),
            ProbeScorer(self.learner),
            ProcessGroupTransport,
            num_engines=len(self.task["urls"]),
            keep=2,
            bucket_bytes=BUCKET_BYTES,
            deadline_s=self.task["deadline_s"],
        )

    def move(self) -> None:
        """Other weights: each rank's part of the same function."""
        with torch.no_grad():
            for chunk in self.learner.model:
                for parameter in chunk.parameters():
                    parameter.mul_(1.1)

    async def prefill(self) -> dict[str, list[NDArray[np.float32]]]:
        """URL → log-probabilities of ROWS, for every admitted engine."""
        return {engine.url: await engine.client.prompt_logprobs(ROWS) for engine in self.fleet._pool.admitted}

    def publish(self, channel: StreamedChannel, version: int, *, publishing: bool = True) -> None:
        """Publish, then compare what each admitted engine says with the learner."""
        measured = channel.publish(version) if publishing else {}
        self.compare(channel, version, measured, self.learner.score_tokens(ROWS), publishing=publishing)

    def publish_beside(self, channel: StreamedChannel, version: int) -> None:
        """The same, while the learner's weights change and its ranks are in collectives of their own."""
        ours = self.learner.score_tokens(ROWS)
        channel.begin(version)
        self.move()
        self.learner.score_tokens(ROWS)
        self.compare(channel, version, channel.finish(), ours)

    def compare(
        self,
        channel: StreamedChannel,
        version: int,
        measured: dict[str, float],
        ours: list[NDArray[np.float32]],
        *,
        publishing: bool = True,
    ) -> None:
        if not self.here:
            return
        theirs = channel._event_loop.run(self.prefill())
        gaps = {
            url: float(max(np.abs(a - b).max() for a, b in zip(ours, rows, strict=True)))
            for url, rows in theirs.items()
        }
        self.found["publishes"][str(version) if publishing else f"{version} resynced"] = {
            "measured": measured,
            "gaps": gaps,
            "versions": channel._event_loop.run(self.fleet.versions()),
            "published": self.run.published_version(),
        }

    def publishes(self) -> None:
        channel = self.channel()
        self.found["registry"] = len(dist.distributed_c10d._world.pg_group_ranks)
        for version in (1, 2):
            self.move()
            if version == 1:
                self.publish(channel, version)
            else:
                self.publish_beside(channel, version)
        # Both senders of engine 1 lose it (rank 1 of stage 0, rank 3 of stage 1); rank 1 pulls the trigger.
        for version, action in ((3, self.kill), (5, self.stop)):
            self.move()
            if dist.get_rank() == 1:
                self.fleet.victim, self.fleet.break_engine = 1, action
            self.publish(channel, version)
            self.mend(version)
            self.move()
            self.publish(channel, version + 1)
        channel.wait_for_folder()
        self.found["registry_after"] = len(dist.distributed_c10d._world.pg_group_ranks)
        self.crash(channel)
        self.flip(channel)
        self.refuse(channel)

    def crash(self, channel: StreamedChannel) -> None:
        """A sender that dies half-way, after it spoilt engine 0: the collector resyncs, the next publish works."""
        if self.here:
            background = channel._event_loop
            background.run(self.fleet.begin_weight_update())
            for bucket in pack(
                [("model.norm.weight", torch.zeros(self.learner.model_config.hidden_size))],
                BUCKET_BYTES,
                channel._transport.new_buffer,
            ):
                channel._transport.send(bucket)
            channel._transport.finish()
            assert self.fleet._open is not None
            background.run(self.fleet._open.aclose())
            self.fleet._open = None
            self.found["after_crash"] = list(background.run(self.fleet.versions()).values())
            background.run(self.fleet.resync(6, self.run.policy_directory(6)))
        self.publish(channel, 6, publishing=False)
        self.publish(channel, 7)

    def flip(self, channel: StreamedChannel) -> None:
        """One bit of one bucket changes on its way to engine 1, the last one of a mantissa."""
        send, buckets = channel._transport.send, 0

        def send_flipped(bucket: Bucket) -> None:
            nonlocal buckets
            buckets += 1
            if buckets == BREAK_AT:
                bucket.data[8] ^= 1  # the lowest byte of a float32, after everything was hashed and kept
            send(bucket)

        if dist.get_rank() == 1:  # of stage 0, whose engine is engine 1
            channel._transport.send = send_flipped  # type: ignore[method-assign]
        self.publish(channel, 8)
        channel._transport.send = send  # type: ignore[method-assign]

    def refuse(self, channel: StreamedChannel) -> None:
        """No engine comes as near as is asked here: all ranks raise, and the version before stays published."""
        channel._plan = WeightCheckPlan(rows=ROWS, max_mean_gap_nats=1e-12, new_checksums=None)
        try:
            channel.publish(9)
        except EngineUnavailableError as error:
            self.found["refused"] = str(error)
        channel.wait_for_folder()
        self.found["published_after_refusal"] = self.run.published_version()
        self.found["folders"] = sorted(path.name for path in self.run.policies.iterdir())

    def kill(self) -> None:
        psutil.Process(self.task["pids"][1]).kill()

    def stop(self) -> None:
        process = psutil.Process(self.task["pids"][1])
        for one in [process, *process.children(recursive=True)]:
            one.send_signal(signal.SIGSTOP)

    def mend(self, version: int) -> None:
        """The test starts the engine again, or wakes it."""
        out = Path(self.task["out"])
        if self.here:
            (out / f"broken-{version}").touch()
        mended = out / f"mended-{version}"
        ends = time.monotonic() + 150
        while not mended.exists():
            assert time.monotonic() < ends, f"{mended} never came"
            time.sleep(0.1)
        pid = int(mended.read_text())
        self.task["pids"][1] = pid
        answers = 0
        while self.here and answers < 3:  # a publish gives it a second, which a process that was just woken may need
            assert time.monotonic() < ends, "the mended engine does not answer"
            try:
                url = self.task["urls"][1]
                headers = {"Authorization": f"Bearer {self.task['key']}"}
                httpx.get(f"{url}/model_info", headers=headers, timeout=0.5, trust_env=False).raise_for_status()
                answers += 1
            except httpx.HTTPError:
                answers = 0
        dist.barrier()


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """One of four ranks; returns what the test asserts. `task`: model, urls, pids, key, out, deadline_s."""
    here = Rank(task)
    here.publishes()
    return here.found
