"""The disk weight channel: every rank exports, rank 0 writes a policy folder, the engines load it.

    export (all ranks) ─▶ policies/000013 (rank 0) ─▶ Engines.load ─▶ policies/PUBLISHED ─▶ prune

A version is named in PUBLISHED only after the engines serve it, so a crash at any point leaves the older version
published and complete.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_bridge.agree import RankZero
from megatron_bridge.policy_files import write_policy
from pipeline.ports import Engines
from pipeline.rundir import write_atomically
from precision.quant_map import QuantMap

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner

PUBLISHED = "PUBLISHED"


class DiskChannel:
    """Implements pipeline.ports.WeightChannel. Construction is collective."""

    def __init__(
        self,
        learner: MegatronLearner,
        engines: Engines,
        policies: Path,
        quant: QuantMap | None,
        *,
        keep: int,
        deadline_s: float,
    ) -> None:
        """`keep` older policies stay on disk beside the published one. `deadline_s` bounds how long the other ranks
        wait for rank 0 to write and for the engines to load."""
        self._learner = learner
        self._engines = engines
        self._policies = policies
        self._quant = quant
        self._keep = keep
        self._rank_zero = RankZero(deadline_s)

    def publish(self, version: int) -> dict[str, float]:
        """Give the engines the learner's present weights under the name `version`. Collective.

        Returns export_s, prune_s, publish_s (total) and what Engines.load reports, in seconds; {} but on rank 0.
        What fails on rank 0 is raised on every rank, an EvenKeelError as what it is.
        """
        begin = time.monotonic()
        folder = self._policies / f"{version:06}"
        export_policy(self._learner, folder, self._quant, self._rank_zero)
        exported = time.monotonic()
        seconds = self._rank_zero.run(lambda: self._load_and_name(version, folder))
        if seconds is None:
            return {}
        return {"export_s": exported - begin, **seconds, "publish_s": time.monotonic() - begin}

    def _load_and_name(self, version: int, folder: Path) -> dict[str, float]:
        seconds = asyncio.run(self._engines.load(version, folder))
        write_atomically(self._policies / PUBLISHED, f"{version}\n")
        loaded = time.monotonic()
        prune(self._policies, version, self._keep)
        return {**seconds, "prune_s": time.monotonic() - loaded}


def published_version(policies: Path) -> int | None:
    """The version that the engines serve; None before the first publish."""
    try:
        return int((policies / PUBLISHED).read_text())
    except FileNotFoundError:
        return None


def export_policy(learner: MegatronLearner, folder: Path, quant: QuantMap | None, rank_zero: RankZero) -> None:
    """Write the learner's weights as a policy folder. Collective: every rank takes part in gathering each tensor.

    What fails on rank 0 is raised on every rank, after all ranks have finished gathering.
    """
    tensors = learner.named_weights()

    def write() -> None:
        try:
            write_policy(tensors, learner.model_folder, folder, quant)
        finally:
            _exhaust(tensors)  # the other ranks are in the same gathers, whatever happened here

    if not rank_zero.here:
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
