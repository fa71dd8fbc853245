"""The disk weight channel: every rank exports, rank 0 writes a policy folder, the engines load it.

    probe (all ranks) ─▶ export (all ranks) ─▶ policy/000013 + its check (rank 0) ─▶ Fleet.load ─▶ PUBLISHED ─▶ prune
                            └─▶ policy/000013/maps/DIGEST + its check, for each older quant map that is still served

PUBLISHED names a version only after the engines were verified to hold it. A crash at any point leaves the older version
published and complete. The other channels share WeightCheckPlan, BackgroundChannel, `prune` and ProbeScorer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bridge.hf.folders import export_policy
from megatron_bridge.parallel.rank_sync import RankSync
from megatron_bridge.step.fp8_emulation import emulated
from pipeline.background import in_background, is_over
from pipeline.data.deltas import needed
from pipeline.data.files import remove_folder
from pipeline.data.quant_maps import digest_of, older_folder
from pipeline.data.run_directory import RunDirectory, numbered, numbered_folders
from pipeline.ports.weights import Probe, WeightChannel, WeightCheck
from pipeline.spans import Stopwatch
from precision.formats.audit import formats_of
from precision.formats.quant_map import QuantMap
from precision.mismatch.statistics import gap

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner
    from rollout_sglang.fleet import Fleet
    from rollout_sglang.weights.expected_checksums import ExpectedChecksums

CONTROL_S = 240.0
"""Time that one phase of a publish may take beyond the engines' deadline: pausing, verifying, closing sessions."""


@dataclass(frozen=True, kw_only=True)
class WeightCheckPlan:
    """The parts of the engines' check that are the same for every publish of a run (pipeline.ports.weights)."""

    rows: tuple[tuple[int, ...], ...]
    """Token ids of the probe."""
    max_mean_gap_nats: float
    new_checksums: Callable[[], ExpectedChecksums] | None
    """Creates a recorder of the checksums that the engines should report; None if these cannot be computed."""
    dtype: str | None = None
    """The engines' compute dtype ("bfloat16"). None: the engines are not asked for the formats of their weights."""

    def formats(self, quant: QuantMap | None) -> dict[str, str] | None:
        """Return the formats that the engines should report when they serve `quant`."""
        return None if self.dtype is None else formats_of(quant, self.dtype)


class BackgroundChannel(WeightChannel):
    """A channel whose `begin` leaves the delivery to a thread."""

    _delivery: Future[dict[str, float]] | None = None

    def publish(self, version: int) -> dict[str, float]:
        """Publish the learner's present weights as `version` and wait. Returns the metrics of `finish`."""
        self.begin(version, learner_waits=True)
        return self.finish()

    def is_over(self, wait_s: float) -> bool:
        return is_over(self._delivery, wait_s)

    def finish(self) -> dict[str, float]:
        delivery, self._delivery = self._delivery, None
        return {} if delivery is None else delivery.result()

    def wait_for_folder(self) -> None:
        """Return at once: the folder is complete when `finish` returns."""


class DiskChannel(BackgroundChannel):
    """A channel that writes a policy folder on rank 0 and has the engines load it. Construction is collective. Metrics:
    score_s, export_s, prune_s, publish_s (total), engines_paused_s in seconds, and the metrics of ProbeScorer.score and
    Fleet.load. {} except on rank 0. An error on one rank is raised on every rank; an EvenKeelError keeps its type."""

    def __init__(
        self,
        learner: MegatronLearner,
        engines: Fleet,
        run: RunDirectory,
        quant: QuantMap | None,
        plan: WeightCheckPlan,
        probe: ProbeScorer,
        *,
        keep: int,
        deadline_s: float,
    ) -> None:
        """`keep` older policies stay on disk beside the published one. `deadline_s` limits the engines' time for one
        load. The other ranks wait longer for rank 0, for the lock's wait, a second attempt and verifying."""
        self._learner = learner
        self._engines = engines
        self._run = run
        self._quant = quant
        self._plan = plan
        self._probe = probe
        self._keep = keep
        self._rank_sync = RankSync(2 * deadline_s + CONTROL_S)

    def set_map(self, quant: QuantMap | None) -> None:
        """Publish in these formats from now on. Called on every rank."""
        self._quant = quant

    def begin(self, version: int, older: Sequence[QuantMap] = (), *, learner_waits: bool = False) -> None:  # noqa: ARG002
        """Export before returning, whether or not `learner_waits`. `older` are quant maps that engines still serve."""
        watch = Stopwatch(lane="publish", version=version)
        probe, terms = self._probe.score(self._plan.rows, self._plan.max_mean_gap_nats, self._quant)
        watch.lap("score_s")
        folder = self._run.policy_directory(version)
        check = self._export(version, folder, self._quant, probe)
        for quant in older:
            self._export(version, older_folder(folder, digest_of(quant.to_file())), quant, probe)
        watch.lap("export_s")

        def deliver() -> dict[str, float]:
            if not self._rank_sync.is_rank_zero:
                return {}
            seconds = asyncio.run(self._engines.load(version, folder, check))
            paused_s = sum([seconds.get(name, 0.0) for name in ("pause_s", "load_s", "checksum_s")])
            self._run.set_published(version)
            pruning = Stopwatch()
            with pruning.phase("prune_s"):
                prune(self._run.policies, version, self._keep)
            measured = {**watch.seconds, **terms, **seconds, **pruning.seconds}
            return {**measured, "engines_paused_s": paused_s, "publish_s": watch.total_s}

        self._delivery = in_background(deliver, "delivery")

    def finish(self) -> dict[str, float]:
        delivery, self._delivery = self._delivery, None
        measured = {} if delivery is None else self._rank_sync.tell(delivery.result)
        return measured if self._rank_sync.is_rank_zero else {}

    def close(self) -> None:
        asyncio.run(self._engines.close())

    def _export(self, version: int, folder: Path, quant: QuantMap | None, probe: Probe) -> WeightCheck | None:
        """Write one policy folder with its check. Returns the check on rank 0."""
        digests = None if self._plan.new_checksums is None else self._plan.new_checksums()
        learner = self._learner
        check: WeightCheck | None = None

        def write_check(folder: Path) -> None:
            nonlocal check
            known = () if digests is None else digests.digests()
            check = WeightCheck(version=version, probe=probe, digests=known, formats=self._plan.formats(quant))
            check.save(folder)

        export_policy(
            learner.named_weights(),
            learner.model_folder,
            folder,
            self._rank_sync,
            quant=quant,
            digests=digests,
            beside=write_check,
            fence=self._run.fence,
        )
        return check


def prune(policies: Path, published: int, keep: int) -> None:
    """Delete all policies older than the published one, except the `keep` newest and the versions that the kept ones
    build on. Newer policies stay: a resumed run will write those versions again."""
    older = [version for version in numbered_folders(policies) if version < published]
    kept = needed(policies, [*older[max(0, len(older) - keep) :], published])
    doomed = [version for version in older if version not in kept]
    for version in reversed(doomed):  # a delta is removed before the version that it builds on
        remove_folder(policies / numbered(version))


def joined_digests(shares: Iterable[Sequence[Mapping[str, str]]]) -> tuple[Mapping[str, str], ...]:
    """Join the digests of all shares of a policy, for each rank of an engine; empty shares have none."""
    known = [share for share in shares if share]
    return tuple(
        {name: digest for part in ranks for name, digest in part.items()} for ranks in zip(*known, strict=True)
    )


class ProbeScorer:
    """A scorer of the probe's rows that remembers their scores at the previous publish."""

    def __init__(self, learner: MegatronLearner) -> None:
        self._learner = learner
        self._former: Tensor | None = None

    def score(
        self, rows: tuple[tuple[int, ...], ...], max_mean_gap_nats: float, quant: QuantMap | None
    ) -> tuple[Probe, dict[str, float]]:
        """Score the probe at the present weights. Collective. Also returns probe_staleness_nats (from the second
        publish on), and probe_quantization_nats (mean absolute) and probe_quantization_ess if Megatron's own layers can
        emulate the formats, which costs a rounding of the quantized weights and one pass."""
        learner = self._learner
        plain = learner.score_tokens(rows, temperature=1.0)
        flat = torch.from_numpy(np.concatenate(plain).astype(np.float64))
        measured: dict[str, float] = {}
        if self._former is not None:
            measured["probe_staleness_nats"] = gap(flat, self._former).mean_abs
        self._former = flat
        quantized: list[NDArray[np.float32]] = []
        if quant is None or not quant.formats or learner.emulation is not None:
            quantized = plain  # the learner already computes in the map's formats
        elif learner.layers == "megatron":
            with emulated(learner, quant):
                quantized = learner.score_tokens(rows, temperature=1.0)
            formats = gap(flat, torch.from_numpy(np.concatenate(quantized).astype(np.float64)))
            measured |= {"probe_quantization_nats": formats.mean_abs, "probe_quantization_ess": formats.ess}
        probe = Probe(
            rows=rows,
            logprobs=tuple([tuple(row.tolist()) for row in plain]),
            quantized=tuple([tuple(row.tolist()) for row in quantized]),
            max_mean_gap_nats=max_mean_gap_nats,
        )
        return probe, measured
