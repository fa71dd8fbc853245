"""The delta weight channel: ranks write the bytes that changed since the last version, and engines overwrite them.

    every rank    gather ─▶ quantize ─▶ compare with the published bytes ─▶ policy/000013/delta-00002.bin
    rank 0            manifest, delta.json, check ─▶ rename ─▶ Fleet.load ─▶ PUBLISHED ─▶ prune
    engine's role                                   └─▶ replica of 13, while the engine serves

Published bytes are compared, not weights: a small step leaves most bytes unchanged, especially in FP8. A delta holds
new bytes and their places, so applying it twice changes nothing, and the manifest has every tensor's checksum
afterwards (pipeline.data.deltas).

A version is written whole if there is no version to compare with, every `whole_every` versions, if the changes take
nearly as many bytes, and if an engine reports that it cannot make its replica. A starting engine begins with the newest
whole version. If no engine takes a delta, the same version is published again, whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_bridge.hf.folders import complete_policy, expected_bytes
from megatron_bridge.hf.tensor_files import Manifest, manifest_entry, spec_of, whole_tensors, write_shards
from megatron_bridge.parallel.rank_sync import RankSync, taking
from megatron_bridge.weight_sync.disk import (
    CONTROL_S,
    BackgroundChannel,
    ProbeScorer,
    WeightCheckPlan,
    joined_digests,
    prune,
)
from megatron_bridge.weights import export_stage, stage_tensors
from pipeline.background import in_background
from pipeline.data.deltas import Bytes, Delta, DeltaWriter, Payload, payload_name, state_of
from pipeline.data.files import require_space, temporary_name
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EngineUnavailableError
from pipeline.ports.weights import Probe, WeightCheck
from pipeline.spans import Stopwatch
from precision.formats.quant_map import QuantMap
from precision.formats.streams import quantize_state

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner
    from rollout_sglang.fleet import Fleet

DENSE = 0.75
"""Largest delta as a share of the whole: unpacking more takes longer than reading the rest (docs/precision.md)."""
_log = logging.getLogger(__name__)


class DeltaChannel(BackgroundChannel):
    """A channel that writes changed bytes on every rank and has the engines make replicas. Construction is collective.

    Metrics: score_s, export_s (gather, quantize, compare), write_s, prune_s, publish_s (total) in seconds,
    delta_density (share of numbers that changed; 1 without a comparison), published_bytes (read by engines),
    whole_bytes, published_whole (1 or 0), and the metrics of ProbeScorer.score and Fleet.load. {} except on rank 0. An
    error on one rank is raised on every rank; an EvenKeelError keeps its type.
    """

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
        whole_every: int,
        deadline_s: float,
    ) -> None:
        """`keep` older policies stay on disk beside the published one, with the versions that they build on.
        `deadline_s` limits an engine's time for its replica, and again for loading it."""
        self._learner = learner
        self._engines = engines
        self._run = run
        self._quant = quant
        self._plan = plan
        self._probe = probe
        self._keep = keep
        self._whole_every = whole_every
        self._rank_sync = RankSync(3 * deadline_s + CONTROL_S)
        self._rank = self._rank_sync.rank
        names = stage_tensors(learner.model, learner.model_config)
        stages = self._rank_sync.gather(parallel_state.get_pipeline_model_parallel_rank)
        ranks = [rank for rank, stage in enumerate(stages) if stage == stages[self._rank]]
        self._names = share_of(names, learner.model_config.tensors(), ranks.index(self._rank), len(ranks))
        self._share = PublishedShare()
        self._shared_map = None if quant is None else quant.restricted(n.removesuffix(".weight") for n in self._names)
        self._base: tuple[int, str] | None = None
        """Version and state of the share's tensors; None until they are published."""
        self._whole = 0
        """The newest whole version."""
        self._whole_bytes = 0
        """Size of the last version over all ranks; 0 before the first."""

    def begin(self, version: int, *, learner_waits: bool = False) -> None:  # noqa: ARG002
        """Take every rank's share before returning, with or without `learner_waits`."""
        watch = Stopwatch(lane="publish", version=version)
        probe, terms = self._probe.score(self._plan.rows, self._plan.max_mean_gap_nats, self._quant)
        watch.lap("score_s")
        begun = self._rank_sync.tell(lambda: self._begin(version))
        temporary = self._run.policies / begun["temporary"]
        base, self._base = (self._base if begun["compares"] else None), None
        with self._removed_on_failure(temporary):
            shares = self._rank_sync.gather(lambda: self._take(temporary, base is not None))
        watch.lap("export_s")
        self._delivery = in_background(
            lambda: self._deliver(version, watch, probe, terms, base, begun, shares), "delivery"
        )

    def _deliver(
        self,
        version: int,
        watch: Stopwatch,
        probe: Probe,
        terms: dict[str, float],
        base: tuple[int, str] | None,
        begun: dict[str, Any],
        shares: list[dict[str, Any]],
    ) -> dict[str, float]:
        """Deliver the shares to the engines, up to PUBLISHED. Runs on every rank, in its own thread."""
        temporary, is_whole = self._run.policies / begun["temporary"], begun["is_whole"]
        sizes = {name: sum(share[name] for share in shares) for name in ("bytes", "delta_bytes", "numbers", "changed")}
        self._whole_bytes = sizes["bytes"]
        if base is None or sizes["delta_bytes"] > DENSE * sizes["bytes"]:
            base, is_whole = None, True
        check = WeightCheck(
            version=version,
            probe=probe,
            digests=joined_digests(share["digests"] for share in shares),
            formats=self._plan.formats(self._quant),
        )
        delta: Delta | None = None
        if base is not None:
            widths, payloads = dict[str, int](), dict[str, Any]()
            for share in shares:
                widths |= share["widths"]
                payloads |= {name: [Payload(*one) for one in runs] for name, runs in share["payloads"].items()}
            delta = Delta(version=version, base=base[0], base_state=base[1], widths=widths, payloads=payloads)
        state = self._write(temporary, check, delta, is_whole)
        watch.lap("write_s")
        seconds = self._rank_sync.tell(lambda: self._load(check, is_whole))
        if seconds is None:
            again = self._rank_sync.tell(lambda: temporary_name(self._run.policy_directory(version)).name)
            delta, is_whole = None, True
            state = self._write(self._run.policies / again, check, delta, is_whole)
            seconds = self._rank_sync.tell(lambda: self._load(check, is_whole))
            assert seconds is not None
        self._base, self._whole = (version, state), version if is_whole else self._whole
        if self._rank:
            return {}
        return {
            **terms,
            **watch.seconds,
            **seconds,
            "publish_s": watch.total_s,
            "delta_density": 1.0 if delta is None else sizes["changed"] / sizes["numbers"],
            "published_bytes": float(sizes["bytes" if delta is None else "delta_bytes"]),
            "whole_bytes": float(sizes["bytes"]),
            "published_whole": float(is_whole),
        }

    def close(self) -> None:
        asyncio.run(self._engines.close())

    def _begin(self, version: int) -> dict[str, Any]:
        compares = self._base is not None and self._base[0] == self._run.published_version()
        stuck = any(engine.stuck for engine in self._run.membership().engines())
        folder = self._run.policy_directory(version)
        num_bytes = self._whole_bytes or expected_bytes(folder, self._learner.model_folder, self._quant)
        require_space(self._run.policies, num_bytes, f"version {version}")
        return dict(
            temporary=temporary_name(folder).name,
            compares=compares,
            is_whole=not compares or stuck or version - self._whole >= self._whole_every,
        )

    def _take(self, temporary: Path, compares: bool) -> dict[str, Any]:
        """Take this rank's share of the next version. Every rank exhausts the gathers, also after an error."""
        temporary.mkdir(parents=True, exist_ok=True)
        writer = DeltaWriter(temporary, self._rank) if compares else None
        digests = None if self._plan.new_checksums is None else self._plan.new_checksums()
        tensors = export_stage(self._learner.model, self._learner.model_config)
        stream: Iterator[tuple[str, Tensor]] = ((name, one) for name, one in tensors if name in self._names)
        if self._shared_map is not None:
            stream = quantize_state(stream, self._shared_map)
        with taking(tensors):
            self._share.take(stream if digests is None else digests.watch(stream), writer)
        return dict(
            bytes=sum(tensor.nbytes for tensor in self._share.tensors.values()),
            numbers=sum(tensor.numel() for tensor in self._share.tensors.values()),
            delta_bytes=0 if writer is None else writer.num_bytes,
            changed=0 if writer is None else writer.num_changed,
            widths={} if writer is None else writer.widths,
            payloads={} if writer is None else {n: [[*p] for p in runs] for n, runs in writer.payloads.items()},
            digests=() if digests is None else digests.digests(),
        )

    def _write(self, temporary: Path, check: WeightCheck, delta: Delta | None, is_whole: bool) -> str:
        """Complete the version's folder and rename it into place. Returns the state of its weights."""

        def share() -> Manifest:
            temporary.mkdir(parents=True, exist_ok=True)
            if delta is None:
                (temporary / payload_name(self._rank)).unlink(missing_ok=True)
            if not is_whole:
                return self._share.manifest()
            tensors = whole_tensors(self._share.tensors.items())
            return write_shards(tensors, temporary, prefix=f"model-rank{self._rank:05}")

        manifest: Manifest = {}

        def complete() -> None:
            check.save(temporary)
            if delta is not None:
                delta.save(temporary)
            folder, fence = self._run.policy_directory(check.version), self._run.fence
            source = self._learner.model_folder
            complete_policy(temporary, folder, manifest, source, self._quant, fence, is_whole=is_whole)

        with self._removed_on_failure(temporary):
            for part in self._rank_sync.gather(share):
                manifest |= part
            self._rank_sync.tell(complete)
        return state_of(manifest)

    @contextmanager
    def _removed_on_failure(self, temporary: Path) -> Iterator[None]:
        """Remove the folder after an error that all ranks raise: on a full disk it would block the next attempt."""
        try:
            yield
        except BaseException:
            if not self._rank:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _load(self, check: WeightCheck, is_whole: bool) -> dict[str, float] | None:
        """Have the engines load the version, and set it as published. Returns None if no engine took a delta."""
        version = check.version
        try:
            seconds = asyncio.run(self._engines.load(version, self._run.policy_directory(version), check))
        except EngineUnavailableError as error:
            if is_whole:
                raise
            _log.warning("version %d is published again, whole: %s", version, error)
            return None
        self._run.set_published(version)
        watch = Stopwatch()
        with watch.phase("prune_s"):
            prune(self._run.policies, version, self._keep)
        return {**seconds, **watch.seconds}


class PublishedShare:
    """One rank's share of the published tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        """The tensors as last published, in host memory."""
        self._sha256: dict[str, str] = {}

    def take(self, stream: Iterable[tuple[str, Tensor]], writer: DeltaWriter | None) -> None:
        """Take the next version's tensors, in their published formats; `writer` gets the changes since the last."""
        for name, tensor in stream:
            new = tensor.detach().to("cpu", copy=True).contiguous()
            old = self.tensors.get(name)
            if writer is None or old is None or writer.add(name, _bytes_of(old), _bytes_of(new), new.itemsize):
                self._sha256[name] = hashlib.sha256(_bytes_of(new).data).hexdigest()
            self.tensors[name] = new

    def manifest(self) -> Manifest:
        """Return the manifest of every tensor, for a folder that holds only changes."""
        specs = {name: spec_of(name, tensor) for name, tensor in self.tensors.items()}
        return {name: manifest_entry(spec, "", self._sha256[name]) for name, spec in specs.items()}


def share_of(names: Sequence[str], shapes: Mapping[str, Sequence[int]], rank: int, num_ranks: int) -> frozenset[str]:
    """Return the tensors of a stage that `rank` sends; every rank computes the same division. Tensors that an engine
    stacks into one parameter stay together, and each such group goes to the rank with the least so far."""
    groups: dict[str, list[str]] = {}
    for name in names:
        module = name.rpartition(".")[0].rpartition(".")[0]
        groups.setdefault(module.partition(".experts")[0], []).append(name)
    sizes = {group: sum(math.prod(shapes[name]) for name in members) for group, members in groups.items()}
    loads, mine = [0] * num_ranks, list[str]()
    for group in sorted(groups, key=lambda one: (-sizes[one], one)):
        least = loads.index(min(loads))
        loads[least] += sizes[group]
        mine += groups[group] if least == rank else []
    return frozenset(mine)


def _bytes_of(tensor: Tensor) -> Bytes:
    return tensor.flatten().view(torch.uint8).numpy()
