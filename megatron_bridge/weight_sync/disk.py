"""The disk weight channel: every rank exports, rank 0 writes a policy folder, the engines load it.

    probe (all ranks) ─▶ export (all ranks) ─▶ policy/000013 + proof.json (rank 0) ─▶ Engines.load ─▶ PUBLISHED ─▶ prune

A version is named in PUBLISHED only after the engines have proved that they hold it, so a crash at any point leaves the
older version published and complete.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_bridge.hf.writer import write_policy
from megatron_bridge.parallel.rank_sync import RankZero
from pipeline.data.run_directory import RunDirectory
from pipeline.ports.engines import Engines
from pipeline.ports.weight_check import ChecksumRecorder, Probe, WeightCheck
from precision.formats.quant_map import QuantMap

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner


@dataclass(frozen=True, kw_only=True)
class WeightCheckPlan:
    """What every version of a run is proved by (pipeline.ports.weight_check)."""

    rows: tuple[tuple[int, ...], ...]
    """Token ids of the probe."""
    max_mean_gap_nats: float
    new_checksums: Callable[[], ChecksumRecorder] | None
    """Where the engines' checksums can be computed; None where they cannot."""

    def probe(self, learner: MegatronLearner) -> Probe:
        """What the learner says at its present weights. Collective."""
        scored = learner.score_tokens(self.rows, temperature=1.0)
        return Probe(
            rows=self.rows,
            logprobs=tuple(tuple(row.tolist()) for row in scored),
            max_mean_gap_nats=self.max_mean_gap_nats,
        )


class DiskChannel:
    """Implements pipeline.ports.weight_update.WeightChannel. Construction is collective."""

    def __init__(
        self,
        learner: MegatronLearner,
        engines: Engines,
        run: RunDirectory,
        quant: QuantMap | None,
        plan: WeightCheckPlan,
        *,
        keep: int,
        deadline_s: float,
    ) -> None:
        """`keep` older policies stay on disk beside the published one. `deadline_s` bounds how long the other ranks
        wait for rank 0 to write and for the engines to load."""
        self._learner = learner
        self._engines = engines
        self._run = run
        self._quant = quant
        self._plan = plan
        self._keep = keep
        self._rank_zero = RankZero(deadline_s)

    def publish(self, version: int) -> dict[str, float]:
        """Give the engines the learner's present weights under the name `version`. Collective.

        Returns score_s, export_s, prune_s, publish_s (total) in seconds and what Engines.load reports; {} but on rank
        0. What fails on rank 0 is raised on every rank, an EvenKeelError as what it is.
        """
        begin = time.monotonic()
        probe = self._plan.probe(self._learner)
        scored = time.monotonic()
        digests = (
            self._plan.new_checksums()
            if self._plan.new_checksums is not None and self._rank_zero.is_rank_zero
            else None
        )
        folder = self._run.policy_directory(version)
        export_policy(self._learner, folder, self._quant, self._rank_zero, digests)
        exported = time.monotonic()
        seconds = self._rank_zero.run(lambda: self._load_and_name(version, folder, probe, digests))
        if seconds is None:
            return {}
        phases = {"score_s": scored - begin, "export_s": exported - scored}
        return {**phases, **seconds, "publish_s": time.monotonic() - begin}

    def wait_for_folder(self) -> None:
        """Nothing is left to wait for: `publish` returns with the folder complete."""

    def close(self) -> None:
        """See WeightChannel."""
        asyncio.run(self._engines.close())

    def _load_and_name(
        self, version: int, folder: Path, probe: Probe, digests: ChecksumRecorder | None
    ) -> dict[str, float]:
        proof = WeightCheck(version=version, probe=probe, digests=() if digests is None else digests.digests())
        proof.save(folder)
        seconds = asyncio.run(self._engines.load(version, folder, proof))
        self._run.set_published(version)
        loaded = time.monotonic()
        prune(self._run.policies, version, self._keep)
        return {**seconds, "prune_s": time.monotonic() - loaded}


def export_policy(
    learner: MegatronLearner,
    folder: Path,
    quant: QuantMap | None,
    rank_zero: RankZero,
    digests: ChecksumRecorder | None = None,
) -> None:
    """Write the learner's weights as a policy folder. Collective: every rank takes part in gathering each tensor.

    What fails on rank 0 is raised on every rank, after all ranks have finished gathering.
    """
    tensors = learner.named_weights()

    def write() -> None:
        try:
            write_policy(tensors, learner.model_folder, folder, quant, digests=digests)
        finally:
            _exhaust(tensors)  # the other ranks are in the same gathers, whatever happened here

    if not rank_zero.is_rank_zero:
        _exhaust(tensors)
    rank_zero.run(write)


def prune(policies: Path, published: int, keep: int) -> list[int]:
    """Delete all but the published policy and the `keep` newest before it, and what dead writers left behind.

    Returns the deleted versions. Newer ones stay: they are from a future that a resumed run will write again.
    """
    versions = sorted(int(path.name) for path in policies.iterdir() if re.fullmatch(r"\d{6,}", path.name))
    older = [version for version in versions if version < published]
    doomed = older[: max(0, len(older) - keep)]
    for version in doomed:
        shutil.rmtree(policies / f"{version:06}")
    for path in policies.iterdir():
        if re.fullmatch(r"\d{6,}\.(tmp|old)-\d+", path.name):
            shutil.rmtree(path)
    return doomed


def _exhaust(tensors: Iterator[tuple[str, Tensor]]) -> None:
    for _ in tensors:
        pass
