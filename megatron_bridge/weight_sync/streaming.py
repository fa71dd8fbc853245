"""The streamed weight channel: learner ranks send their own share of the weights straight into the engines.

    rank 0            number, pause, begin ──────────────────────────────────────▶ end, verify, continue ─▶ PUBLISHED
    every sender             └▶ groups ─▶ (gather ─▶ quantize ─▶ bucket ─▶ transport)* ─┘
    first of a stage                                    └─▶ FolderWriter ─▶ policy/000013, after the publish

A pipeline stage streams only what it holds; the stages stream at the same time. Every rank of a stage has the gathered
tensors, so the engines are divided among its ranks: rank e mod (ranks of the stage) serves engine e. Which engines
there are is read anew by rank 0 at each publish, and told to the others with the number of the update. It sends through
process groups (ProcessGroupTransport) or through memory that the engine opens (IpcTransport). An engine that dies or
hangs delays the publish by at most its deadline. It is skipped for the rest of the publish, then quarantined.

Engines that restart, and a collector that resyncs engines, load the policy folder. It is complete before the next
publish begins, and before any checkpoint of a later version is written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state
from torch import Tensor

from megatron_bridge.hf.writer import complete_policy
from megatron_bridge.parallel.rank_sync import RankSync
from megatron_bridge.weight_sync.background_writer import FolderWriter, gather_manifests
from megatron_bridge.weight_sync.buckets import pack
from megatron_bridge.weight_sync.disk import CONTROL_S, WeightCheckPlan
from megatron_bridge.weight_sync.event_loop_thread import EventLoopThread
from megatron_bridge.weight_sync.export import joined_digests, prune
from megatron_bridge.weight_sync.probe import ProbeScorer
from megatron_bridge.weight_sync.transport import WeightTransport
from megatron_bridge.weights import convert
from pipeline.data.files import temporary_name
from pipeline.data.membership import Member
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EngineUnavailableError, NonFiniteError
from pipeline.ports.weight_check import ChecksumRecorder, WeightCheck
from pipeline.ports.weight_update import WeightUpdateReport, WeightUpdateSession
from pipeline.stopwatch import Stopwatch
from precision.formats.quant_map import QuantMap
from precision.formats.quantize import quantize_block
from precision.formats.streams import quantize_state

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner

_log = logging.getLogger(__name__)
Stream = Iterator[tuple[str, Tensor]]


class StreamedChannel:
    """Implements pipeline.ports.weight_update.WeightChannel. Construction and every method are collective."""

    def __init__(
        self,
        learner: MegatronLearner,
        session: WeightUpdateSession,
        run: RunDirectory,
        quant: QuantMap | None,
        plan: WeightCheckPlan,
        new_transport: type[WeightTransport],
        *,
        keep: int,
        bucket_bytes: int,
        deadline_s: float,
    ) -> None:
        """`keep` older policies stay on disk beside the published one. `deadline_s` bounds how long one engine may take
        for all tensors together, and how long the folder may take.

        A rank that waits for a hanging engine keeps the others of its stage waiting in their gathers: an engine never
        gets more than half of the learner's step deadline.
        """
        self._learner = learner
        self._session = session
        self._run = run
        self.set_map(quant)
        self._plan = plan
        self._probe = ProbeScorer(learner)
        self._keep = keep
        self._bucket_bytes = bucket_bytes
        self._folder_deadline_s = deadline_s
        self._rank_sync = RankSync(2 * deadline_s + CONTROL_S)
        self._event_loop = EventLoopThread("weight-update")
        stage_of = self._rank_sync.all_gather_json(parallel_state.get_pipeline_model_parallel_rank())
        self._num_stages = 1 + max(stage_of)
        self._stage = stage_of[self._rank_sync.rank]
        ranks = [rank for rank, stage in enumerate(stage_of) if stage == self._stage]
        self._stage_rank, self._stage_size = ranks.index(self._rank_sync.rank), len(ranks)
        patience_s = min(deadline_s, learner.section.step_deadline_s / 2)
        self._transport = new_transport(session, self._event_loop, learner.device, patience_s)
        self._engines: list[Member] = []
        """Those of the last publish."""
        self._writer: FolderWriter | None = None
        self._write_s = 0.0

    def set_map(self, quant: QuantMap | None) -> None:
        """Publish in these formats from now on. Called on every rank."""
        self._quant = quant
        self._share = None if quant is None else quant.restricted(_modules(self._learner))
        """The part of it that this stage holds: a module whose weight never comes is an error."""

    def publish(self, version: int) -> dict[str, float]:
        """Give the engines the learner's present weights under the name `version`. Collective.

        Returns score_s, lock_s, pause_s (rank 0), connect_s, gather_s, quantize_s, keep_s (digests and host copies),
        transfer_s (slowest rank; with the engines' loading), load_s and what verifying took (slowest engine), publish_s
        (total), write_s (from the publish before this one until its folder was complete), transfer_bytes (all engines),
        engines_failed, and what ProbeScorer.score measures; {} but on rank 0.
        Raises EngineUnavailableError on every rank when no engine serves the version.
        """
        watch = Stopwatch(lane="publish", version=version)
        self.wait_for_folder()
        probe, terms = self._probe.score(self._plan.rows, self._plan.max_mean_gap_nats, self._quant)
        watch.lap("score_s")
        folder = self._run.policy_directory(version)
        opened = self._rank_sync.all_gather_result(lambda: self._open(folder))[0]
        self._engines = [Member(**engine) for engine in opened["engines"]]
        if self._rank_sync.rank:
            self._session.attend(opened["number"], self._engines)
        temporary = folder.with_name(opened["temporary"])
        if self._stage_rank == 0:
            self._writer = FolderWriter(temporary, self._stage)
        try:
            reports = self._rank_sync.all_gather_result(lambda: self._send_all(dict(opened["failures"])))
            failures = dict(opened["failures"]) | {e: why for report in reports for e, why in report["failures"]}
            digests, formats = joined_digests(report["digests"] for report in reports), self._plan.formats(self._quant)
            check = WeightCheck(version=version, probe=probe, digests=digests, formats=formats)
            closed = self._rank_sync.all_gather_result(lambda: self._close(check, folder, failures))[0]
        except Exception as error:
            self._abandon(version, folder, error)
            raise
        if self._writer is not None:
            self._writer.commit(None if self._rank_sync.rank else lambda: self._complete(check, temporary, folder))
        if self._rank_sync.rank:
            return {}
        slowest = {name: max(report["seconds"][name] for report in reports) for name in reports[0]["seconds"]}
        return {
            **watch.seconds,
            **terms,
            **opened["measured"],
            **slowest,
            **closed["measured"],
            "publish_s": watch.total_s,
            "write_s": self._write_s,
            "transfer_bytes": float(sum(report["bytes"] for report in reports)),
            "engines_failed": float(closed["failed"]),
        }

    def wait_for_folder(self) -> None:
        """Wait until the policy folder of the last publish is complete. Collective; raises on every rank what stopped
        a writer, and DeadlineExceededError."""
        writer, self._writer = self._writer, None
        waited = self._rank_sync.all_gather_result(lambda: writer.wait(self._folder_deadline_s) if writer else 0.0)
        self._write_s = max(waited) or self._write_s

    def close(self) -> None:
        """See WeightChannel. Calls under way are cancelled."""
        self._transport.close()
        self._event_loop.run(self._session.close())
        self._event_loop.close()

    def _open(self, folder: Path) -> Any:
        if self._rank_sync.rank:
            return None
        report = self._event_loop.run(self._session.begin_weight_update())
        return {
            "failures": list(report.failures.items()),
            "measured": dict(report.measured),
            "temporary": temporary_name(folder).name,
            "number": report.number,
            "engines": [asdict(engine) for engine in report.engines],
        }

    def _send_all(self, unreachable: dict[int, str]) -> Any:
        """Stream this stage's share. Every rank of the stage exhausts the gathers, whatever happens to its engines."""
        watch = Stopwatch(("connect_s", "gather_s", "quantize_s", "keep_s", "transfer_s"))
        digests = self._plan.new_checksums() if self._plan.new_checksums is not None and self._writer else None
        tensors = watch.timed("gather_s", convert.export_stage(self._learner.model, self._learner.model_config))
        try:
            with watch.phase("connect_s"):
                mine = [engine for engine in self._engines if engine.index % self._stage_size == self._stage_rank]
                self._transport.open(mine, unreachable)
            if self._transport.engines or self._writer:
                stream = tensors
                if self._share is not None:
                    stream = watch.timed("quantize_s", quantize_state(tensors, self._share, quantize_block))
                stream = watch.timed("keep_s", self._kept(stream, digests))
                for bucket in pack(stream, self._bucket_bytes, self._transport.new_buffer):
                    with watch.phase("transfer_s"):
                        self._transport.send(bucket)
        except FloatingPointError as error:
            raise NonFiniteError(f"weights cannot be published: {error}") from error
        finally:
            for _ in tensors:
                pass
        return {
            "failures": list(self._transport.failures.items()),
            "seconds": watch.seconds,
            "bytes": self._transport.sent_bytes,
            "digests": () if digests is None else digests.digests(),
        }

    def _kept(self, stream: Stream, digests: ChecksumRecorder | None) -> Stream:
        for name, tensor in stream:
            if self._writer is not None:
                self._writer.add(name, tensor)
            if digests is not None:
                digests.observe(name, tensor)
            yield name, tensor

    def _close(self, check: WeightCheck, folder: Path, failures: dict[int, str]) -> Any:
        if self._rank_sync.rank:
            return None
        version = check.version
        report: WeightUpdateReport = self._event_loop.run(
            self._session.end_weight_update(version, folder, check, failures)
        )
        for engine, why in report.failures.items():
            _log.warning("engine %d did not take version %d and is quarantined: %s", engine, version, why)
        if len(report.failures) >= len(self._engines):
            raise EngineUnavailableError(
                f"no engine of {len(self._engines)} took version {version}; {'; '.join(report.failures.values())}"
            )
        self._run.set_published(version)
        return {"measured": dict(report.measured), "failed": len(report.failures)}

    def _complete(self, check: WeightCheck, temporary: Path, folder: Path) -> None:
        """Rank 0's writer, after its own share."""
        check.save(temporary)
        manifest = gather_manifests(temporary, self._num_stages, self._folder_deadline_s)
        complete_policy(temporary, folder, manifest, self._learner.model_folder, self._quant, self._run.fence)
        prune(self._run.policies, check.version, self._keep)

    def _abandon(self, version: int, folder: Path, error: Exception) -> None:
        """After a failure: remove the unfinished folder and quarantine every engine."""
        if self._writer is not None:
            self._writer.discard()
        if self._rank_sync.rank == 0 and self._session.is_open:
            everyone = {engine.index: str(error) for engine in self._engines}
            self._event_loop.run(self._session.end_weight_update(version, folder, None, everyone))


def _modules(learner: MegatronLearner) -> Iterator[str]:
    """Names of the modules of this rank's pipeline stage."""
    return (name.removesuffix(".weight") for name in convert.stage_tensors(learner.model, learner.model_config))
