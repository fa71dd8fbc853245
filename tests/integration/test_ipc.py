"""Real SGLang servers open memory of this process and load what lies in it, bit by bit.

The whole loop by this channel is in test_loop.py and in tests/chaos/kills.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_bridge.hf.folders import write_policy
from megatron_bridge.hf.tensor_files import TensorFolder
from megatron_bridge.weight_sync.ipc_transport import IpcTransport
from megatron_bridge.weight_sync.transport import Bucket, EventLoopThread, pack
from pipeline.config.sections import RolloutPrecision
from pipeline.data.batch import Sampling
from pipeline.ports.weights import WeightCheck, WeightUpdateReport
from precision.formats.quant_map import QuantMap
from precision.formats.streams import quantize_state
from rollout_sglang.server.start import EngineSpec, ServerProcess, free_port
from rollout_sglang.weights.expected_checksums import ExpectedChecksums
from rollout_sglang.weights.weight_update import FleetUpdateSession
from tests.doubles.tiny_model import write_checkpoint
from tests.support.engine_forks import start_engine
from tests.support.engines import num_decodes, wait_for_decode
from tests.support.fleets import members, settings
from tests.support.runs import ROOT, environment

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

BUCKET_BYTES = 1 << 16
DEADLINE_S = 30.0
STALE_S = 8.0
"""A sender that lives shows it every 5 s; the product waits longer for one that no other start has superseded."""
PRECISIONS: tuple[RolloutPrecision, ...] = ("bf16", "fp8_block")
MIXED = QuantMap.for_decoder(2, "fp8_block").promoted(["model.layers.1.mlp.down_proj"])
SENDER = "from tests.integration.test_ipc import die_half_way; import sys; die_half_way(*sys.argv[1:])"


@dataclass(frozen=True)
class Engine:
    """A running server and the checkpoints whose weights it is sent."""

    process: ServerProcess
    url: str
    precision: RolloutPrecision
    checkpoints: tuple[Path, Path]
    lock: Path

    def policy(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """As a learner in bf16 would send it; versions take turns between two checkpoints."""
        tensors = ((name, tensor.bfloat16()) for name, tensor in TensorFolder(self.checkpoints[version % 2]).tensors())
        return tensors if self.precision == "bf16" else quantize_state(tensors, MIXED)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    root = tmp_path_factory.mktemp("shared")
    first, second = (write_checkpoint(root / f"checkpoint-{seed}", seed) for seed in (0, 1))
    found: dict[str, Engine] = {}
    with ExitStack() as stack:
        for precision in PRECISIONS:
            quant = None if precision == "bf16" else MIXED
            model = root / precision / "model"
            write_policy(TensorFolder(first).tensors(), first, model, quant)
            spec = EngineSpec(
                model=model,
                port=free_port(),
                precision=precision,
                dtype="bfloat16",
                log=root / f"{precision}.log",
                version=0,
            )
            process = start_engine(spec)
            stack.callback(process.kill)
            found[precision] = Engine(process, spec.url, precision, (first, second), root / precision / "lock")
        for engine in found.values():
            engine.process.wait_ready(300)
        yield found


class Sender:
    """A learner rank with its fleet, as far as weights are concerned."""

    def __init__(self, urls: Sequence[str], lock: Path, background: EventLoopThread) -> None:
        self.background = background
        membership = members(lock.parent, urls)
        self.fleet = FleetUpdateSession(membership, **settings(lock.parent, stale_s=STALE_S), ranks_per_engine=1)
        self.transport = IpcTransport(self.fleet, background, torch.device("cpu"), DEADLINE_S)

    def send(
        self,
        tensors: Iterator[tuple[str, Tensor]],
        before: Callable[[Bucket, int], None] | None = None,
        *,
        serving: bool = False,
    ) -> None:
        """Open, and send all; `before` sees each bucket and its place. The engines are `serving` meanwhile, or not."""
        opened = self.background.run(self.fleet.begin_weight_update(serving=serving))
        assert opened.staging == ([0] if serving else [])
        self.transport.open(opened.engines, opened.failures)
        for place, bucket in enumerate(pack(tensors, BUCKET_BYTES, self.transport.new_buffer)):
            if before is not None:
                before(bucket, place)
            self.transport.send(bucket)
        self.transport.finish()

    def verify(self, version: int, digests: ExpectedChecksums | None) -> WeightUpdateReport:
        check = None if digests is None else WeightCheck(version=version, digests=digests.digests())
        closing = self.fleet.end_weight_update(version, Path(f"/nowhere/{version}"), check, self.transport.failures)
        return self.background.run(closing)

    def publish(self, engine: Engine, version: int) -> WeightUpdateReport:
        """Every parameter's checksum is that of what was sent, or the engine is not admitted."""
        digests = ExpectedChecksums(dtype=torch.bfloat16, num_kv_heads=2)
        self.send(digests.watch(engine.policy(version)))
        return self.verify(version, digests)


@contextmanager
def sender_to(urls: Sequence[str], lock: Path) -> Iterator[Sender]:
    background = EventLoopThread("sender")
    sender = Sender(urls, lock, background)
    try:
        yield sender
    finally:
        sender.transport.close()
        background.run(sender.fleet.close())
        background.close()


def die_half_way(url: str, lock: str, checkpoint: str) -> None:
    """A sender that has sent two buckets; it prints the file of its memory and waits for its end."""
    sender = Sender([url], Path(lock), EventLoopThread("sender"))

    def halt(_: Bucket, place: int) -> None:
        if place == 2:
            assert sender.transport._buffer is not None
            print(sender.transport._buffer.file, sender.transport.failures, flush=True)
            sys.stdin.read()

    sender.send(((name, tensor.bfloat16()) for name, tensor in TensorFolder(Path(checkpoint)).tensors()), halt)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_bit_arrives_while_requests_are_under_way(engines: dict[str, Engine], precision: str) -> None:
    engine = engines[precision]
    sampling = Sampling(max_new_tokens=400, temperature=1.0)
    with sender_to([engine.url], engine.lock) as sender:
        assert sender.publish(engine, 1).failures == {}
        before = num_decodes(engine.process.log)
        waiting = sender.background.start(sender.fleet.generate([5, 6, 7], 4, sampling))
        wait_for_decode(engine.process.log, before)
        report = sender.publish(engine, 2)
        assert report.failures == {}
        assert report.measured["engines_checked"] == 1, "checksums were compared"
        versions = [sample.versions for sample in waiting.result(60)]
        assert all(list(one) == sorted(one) for one in versions)
        assert {1, 2} in [set(one) for one in versions], "answers went on with the weights that came"
        assert sender.transport.sent_bytes == sum(tensor.nbytes for _, tensor in engine.policy(2))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_engine_serves_its_version_until_it_has_all_of_the_next(engines: dict[str, Engine], precision: str) -> None:
    engine = engines[precision]
    sampling = Sampling(max_new_tokens=8, temperature=1.0)
    with sender_to([engine.url], engine.lock) as sender:
        assert sender.publish(engine, 1).failures == {}
        sampled = list[tuple[int, ...]]()

        def sample(_: Bucket, place: int) -> None:
            if place == 2:
                answered = sender.background.run(sender.fleet.generate([5, 6, 7], 1, sampling))
                sampled.extend(one.distinct_versions for one in answered)

        digests = ExpectedChecksums(dtype=torch.bfloat16, num_kv_heads=2)
        sender.send(digests.watch(engine.policy(2)), sample, serving=True)
        assert sampled == [(1,)], "half of version 2 was there when it was asked"
        assert sender.background.run(sender.fleet.versions()) == {engine.url: 1}
        report = sender.verify(2, digests)
        assert report.failures == {}
        assert report.measured["engines_checked"] == 1
        answered = sender.background.run(sender.fleet.generate([5, 6, 7], 1, sampling))
        assert [one.distinct_versions for one in answered] == [(2,)]
        assert sender.publish(engine, 3).failures == {}, "paused from the beginning, it takes weights as before"


@pytest.mark.parametrize("serving", [False, True])
def test_a_flipped_bit_is_never_served(engines: dict[str, Engine], serving: bool) -> None:
    engine = engines["fp8_block"]

    def flip(bucket: Bucket, place: int) -> None:
        if place == 1:
            bucket.data[8] ^= 1

    with sender_to([engine.url], engine.lock) as sender:
        assert sender.publish(engine, 4).failures == {}
        digests = ExpectedChecksums(dtype=torch.bfloat16, num_kv_heads=2)
        sender.send(digests.watch(engine.policy(3)), flip, serving=serving)
        assert sender.transport.failures == {}
        assert sender.verify(3, digests).failures.keys() == {0}
        assert sender.publish(engine, 4).failures == {}


def test_a_sender_that_dies_half_way_leaves_an_engine_that_takes_weights_again(engines: dict[str, Engine]) -> None:
    engine = engines["bf16"]
    command = [sys.executable, "-c", SENDER, engine.url, str(engine.lock), str(engine.checkpoints[1])]
    dying = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with dying:
        assert dying.stdout is not None
        file, failures = dying.stdout.readline().split(maxsplit=1)
        assert failures.strip() == "{}"
        assert Path(file).exists()
        dying.kill()
    with sender_to([engine.url], engine.lock) as sender:
        assert sender.background.run(sender.fleet.versions()) == {engine.url: None}, (
            "it has half of the weights and claims no version"
        )
        assert sender.publish(engine, 3).failures == {}
        assert sender.background.run(sender.fleet.versions()) == {engine.url: 3}
    assert not Path(file).exists(), "the dead sender's memory is gone, though the engine had it open"
