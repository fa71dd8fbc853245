"""Policy folders: all ranks gather the weights, rank 0 writes them; folders that nothing needs any more are deleted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from megatron_bridge.hf.writer import write_policy
from megatron_bridge.parallel.rank_sync import RankZero
from pipeline.data.deltas.chain import needed
from pipeline.data.files import temporary_name
from pipeline.data.run_directory import numbered, numbered_folders, unfenced
from pipeline.ports.weight_check import ChecksumRecorder
from precision.formats.quant_map import QuantMap


def export_policy(
    tensors: Iterator[tuple[str, Tensor]],
    model_folder: Path,
    folder: Path,
    rank_zero: RankZero,
    *,
    quant: QuantMap | None = None,
    digests: ChecksumRecorder | None = None,
    fence: Callable[[], None] = unfenced,
) -> None:
    """Write named HF tensors, with config and tokenizer of `model_folder`, as the policy folder `folder`.

    Collective: each tensor is gathered from all ranks when it is asked for, so every rank exhausts `tensors`. What
    fails on rank 0 is raised on every rank, after all ranks have finished gathering.
    """

    def write() -> None:
        try:
            write_policy(tensors, model_folder, folder, quant, digests=digests, fence=fence)
        finally:
            _exhaust(tensors)  # the other ranks are in the same gathers, whatever happened here

    if not rank_zero.is_rank_zero:
        _exhaust(tensors)
    rank_zero.run(write)


def prune(policies: Path, published: int, keep: int) -> list[int]:
    """Delete all but the published policy, the `keep` newest before it, and those that they are made from. Returns the
    deleted versions.

    Newer ones stay: they are from a future that a resumed run will write again.
    """
    older = [version for version in numbered_folders(policies) if version < published]
    kept = needed(policies, [*older[max(0, len(older) - keep) :], published])
    doomed = [version for version in older if version not in kept]
    for version in reversed(doomed):  # a delta goes before what it was made from
        aside = temporary_name(policies / numbered(version))
        (policies / numbered(version)).rename(aside)  # no reader may find a folder half deleted
        shutil.rmtree(aside)
    return doomed


def joined_digests(shares: Iterable[Sequence[Mapping[str, str]]]) -> tuple[Mapping[str, str], ...]:
    """The digests of all shares of a policy, for each rank of an engine; a share that is empty has none."""
    known = [share for share in shares if share]
    return tuple(
        {name: digest for part in ranks for name, digest in part.items()} for ranks in zip(*known, strict=True)
    )


def _exhaust(tensors: Iterator[tuple[str, Tensor]]) -> None:
    for _ in tensors:
        pass
