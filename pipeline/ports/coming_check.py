"""A check of weights that the learner is still working out, while engines already work out theirs.

    engine    has every tensor ─▶ hashes them ──┬▶ compared, named, continues ─▶ scores the probe ─┬▶ admitted
    learner   hashes what it sent ─▶ `digests` ─┘      scores the probe ─▶ `probe` ────────────────┘

What is asked of an engine is known from the beginning: the rows of the probe and the formats. What its answers are
compared with comes later. Nothing is compared less, and nothing later than an engine needs it: an engine is named after
its digests were compared, and admitted after its probe was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TypeVar

from pipeline.errors import EngineVersionError
from pipeline.ports.weight_check import Probe, WeightCheck

T = TypeVar("T")
Digests = tuple[Mapping[str, str], ...]


class ComingCheck:
    """The parts of a WeightCheck. Whoever makes one completes it, or calls `fail`: engines wait for it."""

    def __init__(self, version: int, rows: tuple[tuple[int, ...], ...], formats: Mapping[str, str] | None) -> None:
        self.version = version
        self.rows = rows
        """Of the probe; none without a probe."""
        self.formats = formats
        """As WeightCheck.formats."""
        self.digests: Future[Digests] = Future()
        """As WeightCheck.digests."""
        self.probe: Future[Probe | None] = Future()
        """As WeightCheck.probe."""

    @staticmethod
    def known(version: int, check: WeightCheck | None) -> ComingCheck:
        """All of a check that is there, or of none."""
        check = check or WeightCheck(version=version)
        rows = () if check.probe is None else check.probe.rows
        complete = ComingCheck(check.version, rows, check.formats)
        complete.digests.set_result(check.digests)
        complete.probe.set_result(check.probe)
        return complete

    def fail(self, why: str) -> None:
        """What has not come will not: engines that wait for it fail their check, with an EngineVersionError."""
        for part in (self.digests, self.probe):
            if not part.done():
                error = f"version {self.version} cannot be verified, for the learner failed meanwhile: {why}"
                part.set_exception(EngineVersionError(error))

    def whole(self) -> WeightCheck:
        """The check, once all of it came. Raises TimeoutError before, and what `fail` says."""
        digests, probe = self.digests.result(timeout=0), self.probe.result(timeout=0)
        return WeightCheck(version=self.version, probe=probe, digests=digests, formats=self.formats)


async def come(part: Future[T]) -> T:
    """A part of a check, once it is there. Whoever stops waiting takes it from nobody else."""
    return await asyncio.shield(asyncio.wrap_future(part))
