"""What the engines of a run should serve, and what a fleet of them is told."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NotRequired, TypedDict

from pipeline.data.checksums import verify_folder
from pipeline.data.membership import Member
from pipeline.data.quant_maps import digest_of, older_folder, read_quant_map
from pipeline.errors import EngineVersionError
from pipeline.ports.weights import ComingCheck, WeightCheck
from rollout_sglang.engine_pool import OnChange
from rollout_sglang.weights.update_lease import Updates


@dataclass(frozen=True)
class Target:
    """The version that every engine should serve, where its weights lie, and how it is verified that an engine holds
    them."""

    version: int
    directory: Path
    check: WeightCheck | None

    @staticmethod
    def read(version: int, directory: Path, known: Target | None = None) -> Target:
        """That of a policy folder, with the check in it. Where no digests tell whether an engine holds these weights,
        the files are compared with their checksums, unless it is the target that was `known` before. Raises StoreError
        for a folder that is damaged, or that of another version."""
        target = Target(version, directory, WeightCheck.load(directory, version))
        if target != known and target.check is not None and not target.has_digests:
            verify_folder(directory, "stop the run and repair it: `evenkeel repair`")
        return target

    @property
    def coming(self) -> ComingCheck:
        """The check, all of which is there."""
        return ComingCheck.known(self.version, self.check)

    @property
    def has_digests(self) -> bool:
        """Whether checksums alone tell the version's weights from all others."""
        return self.check is not None and bool(self.check.digests)

    def of_map(self, engine: Member) -> Target:
        """The same for one engine, in the formats of the quant map that it was started with.

        Raises EngineVersionError where the version was published after the last engine with that map had gone.
        """
        if not engine.quant_map:
            return self
        older = older_folder(self.directory, engine.quant_map)
        if older.is_dir():
            return Target(self.version, older, WeightCheck.load(older, self.version))
        newest = self._quant_map
        if newest not in ("", engine.quant_map):  # empty where the folder behind a broadcast was not written yet
            raise EngineVersionError(
                f"engine {engine.index} at {engine.url} was started with quant map {engine.quant_map}, and version "
                f"{self.version} is there for map {newest} alone; it is started again with that when it is its turn"
            )
        return self

    @cached_property
    def _quant_map(self) -> str:
        """Digest of the map of the folder, read once for all engines."""
        return digest_of(read_quant_map(self.directory))


class FleetSettings(TypedDict):
    """What a Fleet takes beside the run's engines."""

    updates: Updates
    api_key: str | None
    request_deadline_s: float
    """Longest wait for an answer, and for an engine to come back."""
    load_deadline_s: float
    """Longest wait for an engine to serve new weights."""
    keeps_kv: NotRequired[bool]
    """Whether requests under way go on over the keys and values of the old weights; default: they are read again."""
    on_change: OnChange | None
