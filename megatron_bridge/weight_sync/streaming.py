"""The streamed weight channel: learner ranks send their shares of the weights straight into the engines.

    every rank's learner thread   (gather ─▶ quantize ─▶ HostSnapshot)* ─▶ probe            ─▶ the next step is trained
    every sender's delivery       connect ─▶ (bucket ─▶ transport)* ─▶ digests and probe when they are ready
    rank 0's delivery             number, pause, begin ──────────────┴▶ end, verify, continue ─▶ PUBLISHED
    first of a stage                                                             FolderWriter ─▶ policy/000013

Once a version is in the snapshots, the learner may train: a delivery reads no parameters, and the deliveries of all
ranks communicate through a process group that no other thread uses meanwhile. A publish beside training begins when the
snapshots are complete and hashed, and pauses engines that can load while serving only at its end. A publish that the
learner waits for pauses the engines at once and sends each bucket as soon as it is packed. Engines hash their weights
and score the probe while the learner still does; the results are compared when both sides have them.

Each pipeline stage streams the tensors it holds; the stages stream at the same time. Every rank of a stage has the
gathered tensors, so the engines are divided among its first ranks, at most one rank per engine of the recipe. On each
host the first of them keeps the snapshot for all (weight_sync.snapshot). At each publish rank 0 reads the list of
engines and sends it to the other ranks with the update's number. A rank sends through process groups
(ProcessGroupTransport) or through memory that the engine opens (IpcTransport). A dead or hung engine delays the publish
by at most its deadline, is skipped, then quarantined.

Engines that restart, and a collector that resyncs engines, load the policy folder. It is complete before the next
publish begins and before a checkpoint of a later version is written.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_bridge.hf.folders import complete_policy, expected_bytes
from megatron_bridge.hf.tensor_files import whole_tensors, write_shards
from megatron_bridge.parallel.rank_sync import RankSync, taking
from megatron_bridge.weight_sync.disk import (
    CONTROL_S,
    BackgroundChannel,
    DiskChannel,
    ProbeScorer,
    WeightCheckPlan,
    joined_digests,
    prune,
)
from megatron_bridge.weight_sync.snapshot import shared_snapshot
from megatron_bridge.weight_sync.transport import EventLoopThread, WeightTransport, pack
from megatron_bridge.weights import export_stage, stage_tensors
from pipeline import spans
from pipeline.background import in_background
from pipeline.data.files import FIRST_POLL_S, require_space, slower, temporary_name, write_atomically
from pipeline.data.membership import Member
from pipeline.data.quant_maps import digest_of
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import DeadlineExceededError, EngineUnavailableError
from pipeline.ports.weights import ComingCheck, Probe, WeightUpdateReport
from pipeline.spans import Stopwatch
from precision.formats.quant_map import QuantMap
from precision.formats.streams import quantize_state

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner
    from rollout_sglang.weights.weight_update import FleetUpdateSession

_log = logging.getLogger(__name__)
Digests = tuple[Mapping[str, str], ...]
Ending = Future[WeightUpdateReport]
PIECES = 8
"""Number of buckets of a share. Packing the first and loading the last overlap with nothing: at most an eighth each."""
SMALLEST_BYTES = 16 << 20
"""Smallest bucket. Each bucket costs an engine one call, but eight were faster than one. Chosen, not measured: glibc in
the engines reuses a buffer of up to 32 MiB, and gets a larger one from the system each time, page by page."""


@dataclass
class _Publish:
    version: int
    folder: Path
    quant: QuantMap | None
    learner_waits: bool
    scored: Future[tuple[Probe, dict[str, float]]] = field(default_factory=Future)
    """The result of ProbeScorer.score."""
    watch: Stopwatch = field(default_factory=lambda: Stopwatch(("score_s", "gather_s", "quantize_s", "keep_s")))
    """Times of the learner's thread."""
    paused_at: float | None = None
    """time.monotonic of the pause; None if every engine serves until all buckets are sent."""
    sent_at: float = 0.0
    """time.monotonic when all buckets were sent, on rank 0."""


class StreamedChannel(BackgroundChannel):
    """A channel that sends each rank's share into the engines. Construction and every method are collective.

    Metrics: score_s, gather_s, quantize_s and keep_s (host copies) are the learner thread's, of the slowest rank;
    lock_s and pause_s are rank 0's. connect_s, digest_s and transfer_s (engines' loading included) are the slowest
    rank's; wire_s is the part of transfer_s until process groups had sent, requests included (0 for ipc). load_s and
    verifying's times are the slowest engine's (stage_s and pause_s if it served until then). Also engines_paused_s,
    publish_s (total), write_s (the previous folder), transfer_bytes (all engines), engines_failed, and those of
    ProbeScorer.score. {} except on rank 0. Raises EngineUnavailableError on every rank if no engine serves the version.
    """

    def __init__(
        self,
        learner: MegatronLearner,
        session: FleetUpdateSession,
        run: RunDirectory,
        quant: QuantMap | None,
        plan: WeightCheckPlan,
        probe: ProbeScorer,
        new_transport: type[WeightTransport],
        *,
        num_engines: int,
        keep: int,
        bucket_bytes: int,
        deadline_s: float,
    ) -> None:
        """`num_engines` engines are expected: at most as many ranks of a stage send. `keep` older policies stay on disk
        beside the published one. `deadline_s` limits one engine's time for all tensors, and the folder's time."""
        self._learner = learner
        self._session = session
        self._run = run
        self.set_map(quant)
        self._plan = plan
        self._probe = probe
        self._keep = keep
        self._bucket_bytes = bucket_bytes
        self._share_bytes = 0
        """Size of the last version's share that this rank sent."""
        self._folder_deadline_s = deadline_s
        self._rank_sync = RankSync(2 * deadline_s + CONTROL_S)
        self._event_loop = EventLoopThread("weight-update")
        stage_of = self._rank_sync.gather(parallel_state.get_pipeline_model_parallel_rank)
        self._num_stages = 1 + max(stage_of)
        self._stage = stage_of[self._rank_sync.rank]
        ranks = [rank for rank, stage in enumerate(stage_of) if stage == self._stage]
        self._stage_rank, self._senders = ranks.index(self._rank_sync.rank), min(len(ranks), num_engines)
        self._transport = new_transport(session, self._event_loop, learner.device, deadline_s)
        self._engines: list[Member] = []
        """The engines of the last publish."""
        on_gpu = learner.device.type == "cuda"
        self._snapshot = shared_snapshot(self._rank_sync, ranks, pinned=on_gpu)
        self._stream = torch.cuda.Stream(learner.device) if on_gpu else None  # type: ignore[no-untyped-call]
        """A stream of its own, so that a delivery's copies wait for no training kernel."""
        self._writer: FolderWriter | None = None
        self._write_s = 0.0

    def set_map(self, quant: QuantMap | None) -> None:
        """Publish in these formats from now on. Called on every rank."""
        self._quant = quant
        self._share = (
            None
            if quant is None
            else quant.restricted(
                name.removesuffix(".weight") for name in stage_tensors(self._learner.model, self._learner.model_config)
            )
        )
        """The part of the map that this stage holds: a module of the map whose weight never comes is an error."""

    def begin(self, version: int, *, learner_waits: bool = False) -> None:
        self.wait_for_folder()
        publish = _Publish(version, self._run.policy_directory(version), self._quant, learner_waits)
        self._snapshot.begin()
        if learner_waits:
            self._delivery = in_background(lambda: self._deliver(publish), "delivery")
        failure: Exception | None = RuntimeError(f"version {version} was not taken from the learner; see its log")
        try:
            with spans.span("publish", "take", version=version):
                failure = self._take(publish.watch)
        finally:
            self._snapshot.end(failure)
        try:  # scored after the weights: engines need the weights first and the probe at the end
            with publish.watch.phase("score_s"):
                scored = self._probe.score(self._plan.rows, self._plan.max_mean_gap_nats, publish.quant)
        except BaseException:
            publish.scored.set_exception(RuntimeError(f"version {version} was not scored; see the log"))
            raise
        publish.scored.set_result(scored)
        if not learner_waits:
            self._delivery = in_background(lambda: self._deliver(publish), "delivery")

    def put_engines_to_sleep(self) -> None:
        """Have the engines give their memory to the learner until the next publish (rollout.colocated)."""
        self._rank_sync.gather(
            lambda: 0.0 if self._rank_sync.rank else self._event_loop.run(self._session.put_to_sleep())
        )

    def wait_for_folder(self) -> None:
        """Wait for this rank's writer, and raise on every rank the error that stopped any, or DeadlineExceededError."""
        assert self._delivery is None, "finish comes first"
        writer, self._writer = self._writer, None
        waited = self._rank_sync.gather(lambda: writer.wait(self._folder_deadline_s) if writer else 0.0)
        self._write_s = max(waited) or self._write_s

    def close(self) -> None:
        """Cancel calls under way and release the connections."""
        self._transport.close()
        self._event_loop.run(self._session.close())
        self._event_loop.close()
        self._snapshot.close()

    def _take(self, watch: Stopwatch) -> Exception | None:
        """Fill the snapshot and return any error. Every rank of the stage exhausts the gathers, also after an error."""
        tensors = watch.timed("gather_s", export_stage(self._learner.model, self._learner.model_config))
        try:
            with taking(tensors):
                # The first ranks send: if a host's first does not, none there does.
                if self._snapshot.is_keeper and self._stage_rank < self._senders:
                    stream = tensors
                    if self._share is not None:
                        stream = watch.timed("quantize_s", quantize_state(tensors, self._share))
                    for name, tensor in stream:
                        with watch.phase("keep_s"):
                            self._snapshot.add(name, tensor)
        except Exception as error:  # noqa: BLE001 (raised by `finish` on every rank)
            return error
        return None

    def _deliver(self, publish: _Publish) -> dict[str, float]:
        """Deliver the snapshots to the engines, up to PUBLISHED. Runs on every rank, in its own thread."""
        beside_training = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with beside_training, spans.span("publish", "deliver", version=publish.version):
            hashing = in_background(self._digests, "weight-digests")
            if not publish.learner_waits:
                self._rank_sync.gather(lambda: hashing.result() and None)
            opened = self._rank_sync.gather(lambda: self._open(publish))[0]
            self._engines = [Member(**engine) for engine in opened["engines"]]
            if self._rank_sync.rank:
                self._session.attend(opened["number"], self._engines, opened["staging"])
            try:
                unreachable = dict(opened["failures"])
                reports = self._rank_sync.gather(lambda: self._send_all(unreachable))
                failures = unreachable | {e: why for report in reports for e, why in report["failures"]}
                formats = self._plan.formats(publish.quant)
                coming = ComingCheck(publish.version, self._plan.rows, formats)
                ending: Ending | None = None
                if not self._rank_sync.rank:
                    publish.sent_at = time.monotonic()
                    end = self._session.end_weight_update(publish.version, publish.folder, coming, failures)
                    ending = self._event_loop.start(end)
                own = self._complete(coming, publish, hashing, ending)
                closed = self._rank_sync.gather(lambda: self._close(publish, ending))[0]
            except Exception as error:
                if self._rank_sync.rank == 0 and self._session.is_open:  # quarantine every engine
                    everyone = {engine.index: str(error) for engine in self._engines}
                    end = self._session.end_weight_update(publish.version, publish.folder, None, everyone)
                    self._event_loop.run(end)
                raise
            check, temporary = coming.whole(), publish.folder.with_name(opened["temporary"])

            def complete() -> None:
                check.save(temporary)
                manifest = gather_manifests(temporary, self._num_stages, self._folder_deadline_s)
                source, fence = self._learner.model_folder, self._run.fence
                complete_policy(temporary, publish.folder, manifest, source, publish.quant, fence)
                prune(self._run.policies, check.version, self._keep)

            if not self._stage_rank:  # the stage's first rank; rank 0 completes the folder after its share
                last = None if self._rank_sync.rank else complete
                self._writer = FolderWriter(temporary, self._stage, self._snapshot, last)
        if self._rank_sync.rank:
            return {}
        seconds = [report["seconds"] | mine for report, mine in zip(reports, own, strict=True)]
        slowest = {name: max(one[name] for one in seconds) for name in seconds[0]}
        return {
            **publish.scored.result()[1],
            **opened["measured"],
            **slowest,
            **closed["measured"],
            "publish_s": publish.watch.total_s,
            "write_s": self._write_s,
            "transfer_bytes": float(sum(report["bytes"] for report in reports)),
            "engines_failed": float(closed["failed"]),
        }

    def _digests(self) -> tuple[Digests, float]:
        """Return this stage's expected checksums and the seconds of hashing; only the stage's first rank hashes."""
        if self._plan.new_checksums is None or self._stage_rank:
            for _ in self._snapshot:  # wait for the snapshot's end
                pass
            return (), 0.0
        digests, watch = self._plan.new_checksums(), Stopwatch(("digest_s",))
        for name, tensor in self._snapshot:
            with watch.phase("digest_s"):
                digests.observe(name, tensor)
        return digests.digests(), watch.seconds["digest_s"]

    def _open(self, publish: _Publish) -> Any:
        if self._rank_sync.rank:
            return None
        num_bytes = expected_bytes(publish.folder, self._learner.model_folder, publish.quant)
        require_space(self._run.policies, num_bytes, f"version {publish.version}")  # before engines are paused
        report = self._event_loop.run(self._session.begin_weight_update(serving=not publish.learner_waits))
        if len(report.staging) < len(report.engines) - len(report.failures):
            publish.paused_at = time.monotonic() - report.measured.get("pause_s", 0.0)
        return {
            "failures": list(report.failures.items()),
            "measured": dict(report.measured),
            "temporary": temporary_name(publish.folder).name,
            "number": report.number,
            "engines": [asdict(engine) for engine in report.engines],
            "staging": list(report.staging),
        }

    def _send_all(self, unreachable: dict[int, str]) -> Any:
        """Send this stage's share to this rank's engines."""
        watch, transport = Stopwatch(("connect_s",)), self._transport
        with watch.phase("connect_s"):
            mine = [engine for engine in self._engines if engine.index % self._senders == self._stage_rank]
            transport.open(mine, unreachable)
        if transport.engines:
            try:
                # Smaller buckets let packing, sending and loading overlap. The first share's size is unknown.
                piece, sent = max(SMALLEST_BYTES, self._share_bytes // PIECES), 0
                most = min(self._bucket_bytes, piece) if self._share_bytes else self._bucket_bytes
                for bucket in pack(self._snapshot, most, transport.new_buffer):
                    transport.send(bucket)
                    sent += bucket.data.nbytes
                self._share_bytes = sent
            finally:
                transport.finish()
        transfer = {"transfer_s": transport.transfer_s, "wire_s": transport.wire_s}
        return {
            "failures": list(transport.failures.items()),
            "seconds": watch.seconds | transfer,
            "bytes": transport.sent_bytes,
        }

    def _complete(
        self,
        coming: ComingCheck,
        publish: _Publish,
        hashing: Future[tuple[Digests, float]],
        ending: Ending | None,
    ) -> list[dict[str, float]]:
        """Set the learner's half of the check once known; return all ranks' seconds. An error fails the engines."""
        try:
            hashed = self._rank_sync.gather(hashing.result)
            coming.digests.set_result(joined_digests(digests for digests, _ in hashed))
            seconds = self._rank_sync.gather(lambda: publish.scored.result() and publish.watch.seconds)
            coming.probe.set_result(publish.scored.result()[0])
        except Exception as error:
            coming.fail(str(error))
            if ending is not None:
                ending.exception()  # wait until the engines are released
            raise
        return [own | {"digest_s": digest_s} for own, (_, digest_s) in zip(seconds, hashed, strict=True)]

    def _close(self, publish: _Publish, ending: Ending | None) -> Any:
        if ending is None:
            return None
        version, report = publish.version, ending.result()
        for engine, why in report.failures.items():
            _log.warning("engine %d did not take version %d and is quarantined: %s", engine, version, why)
        if len(report.failures) >= len(self._engines):
            raise EngineUnavailableError(
                f"no engine of {len(self._engines)} took version {version}; {'; '.join(report.failures.values())}"
            )
        self._run.set_published(version)
        measured = dict(report.measured)
        paused_s = sum(measured.get(name, 0.0) for name in ("pause_s", "load_s", "checksum_s"))
        if publish.paused_at is not None:
            paused_s += publish.sent_at - publish.paused_at
        return {"measured": measured | {"engines_paused_s": paused_s}, "failed": len(report.failures)}


class FolderWriter:
    """A thread that writes one stage's share of a published version to the policy folder."""

    def __init__(
        self,
        temporary: Path,
        stage: int,
        tensors: Iterable[tuple[str, Tensor]],
        complete: Callable[[], None] | None = None,
    ) -> None:
        """Begin to write `tensors`, which must not change meanwhile. All stages write into `temporary`: the first
        creates it, and a stage that fails removes it. On rank 0 the thread calls `complete` after the last shard."""
        self._temporary = temporary
        self._stage = stage
        self._tensors = tensors
        self._complete = complete
        self._failure: Exception | None = None
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._write, name=f"policy-folder-{stage}", daemon=True)
        self._thread.start()

    def wait(self, deadline_s: float) -> float:
        """Wait for the writer; return its seconds. Raises DeadlineExceededError, or the error that stopped it."""
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise DeadlineExceededError(
                f"{self._temporary} was not written within {deadline_s:g} s; see whether its disk is slow or full"
            )
        if self._failure is not None:
            raise self._failure
        return self._seconds

    def _write(self) -> None:
        began = time.monotonic()
        try:
            self._temporary.mkdir(parents=True, exist_ok=True)
            prefix = f"model-stage{self._stage:02}"
            manifest = write_shards(whole_tensors(self._tensors), self._temporary, prefix=prefix)
            write_atomically(self._temporary / f"stage-{self._stage:02}.json", json.dumps(manifest))
            if self._complete is not None:
                self._complete()
            self._seconds = time.monotonic() - began
        except Exception as error:  # noqa: BLE001 (raised by `wait` in the main thread)
            shutil.rmtree(self._temporary, ignore_errors=True)  # an unnamed folder must not fill the disk
            self._failure = error


def gather_manifests(temporary: Path, num_stages: int, deadline_s: float) -> dict[str, Any]:
    """Return the manifest of all stages and remove their parts. Raises DeadlineExceededError if a part is missing."""
    ends = time.monotonic() + deadline_s
    manifest: dict[str, Any] = {}
    for stage in range(num_stages):
        path = temporary / f"stage-{stage:02}.json"
        pause_s = FIRST_POLL_S
        while path.name not in os.listdir(temporary):  # the stage may be on another host: see pipeline.data.store
            if time.monotonic() > ends:
                raise DeadlineExceededError(f"{path} did not appear within {deadline_s:g} s; see that stage's log")
            time.sleep(pause_s)
            pause_s = slower(pause_s)
        manifest |= json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
    return manifest


class MapTransition(BackgroundChannel):
    """A run's usual channel, and a disk channel (possibly the same) for versions published while two quant maps are
    served. Every method except `close` is collective. Adds the metric quant_maps_served."""

    def __init__(
        self,
        usual: DiskChannel | StreamedChannel,
        disk: DiskChannel,
        quant: QuantMap | None,
        older_maps: Callable[[str], Sequence[QuantMap]],
    ) -> None:
        """`older_maps(digest)` returns the announced engines' maps with another digest, the same on all ranks."""
        self._usual = usual
        self._disk = disk
        self._quant = quant
        self._older_maps = older_maps
        self._active: DiskChannel | StreamedChannel = usual
        """The channel of the publish under way, or of the last."""
        self._maps_served = 1.0

    def use_map(self, quant: QuantMap | None) -> None:
        """Publish in these formats from now on."""
        if quant != self._quant:
            self._quant = quant
            for channel in {id(channel): channel for channel in (self._usual, self._disk)}.values():
                channel.set_map(quant)

    def begin(self, version: int, *, learner_waits: bool = False) -> None:
        older = [] if self._quant is None else self._older_maps(digest_of(self._quant.to_file()))
        self._maps_served = 1.0 + len(older)  # maps that some engines still have
        if older:
            self._usual.wait_for_folder()
        self._active = self._disk if older else self._usual
        if older:
            self._disk.begin(version, older, learner_waits=learner_waits)
        else:
            self._usual.begin(version, learner_waits=learner_waits)

    def is_over(self, wait_s: float) -> bool:
        return self._active.is_over(wait_s)

    def finish(self) -> dict[str, float]:
        measured = self._active.finish()
        return {**measured, "quant_maps_served": self._maps_served} if measured else {}

    def wait_for_folder(self) -> None:
        self._usual.wait_for_folder()

    def close(self) -> None:
        self._usual.close()
        if self._disk is not self._usual:
            self._disk.close()
