"""Policy folders: all ranks gather the weights, rank 0 writes them; folders that nothing needs any more are deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from megatron_bridge.hf.writer import WrittenWeights, write_weights
from megatron_bridge.parallel.gathered import exhausted
from megatron_bridge.parallel.rank_sync import RankZero
from pipeline.background import tell_when_done
from pipeline.data.deltas import needed
from pipeline.data.files import remove_folder
from pipeline.data.run_directory import numbered, numbered_folders
from pipeline.errors import NonFiniteError
from pipeline.ports.weights import ChecksumRecorder
from precision.formats.quant_map import QuantMap


@contextmanager
def taking(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
    """Around what takes gathered `tensors` to publish them: they are exhausted at the end, whatever happens. Raises
    NonFiniteError for weights that are not finite."""
    with exhausted(tensors):
        try:
            yield
        except FloatingPointError as error:
            raise NonFiniteError(f"weights cannot be published: {error}") from error


def export_policy(
    tensors: Iterator[tuple[str, Tensor]],
    model_folder: Path,
    folder: Path,
    rank_zero: RankZero,
    *,
    fence: Callable[[], None],
    quant: QuantMap | None = None,
    digests: ChecksumRecorder | None = None,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write named HF tensors, with config and tokenizer of `model_folder`, as the policy folder `folder`; `digests` and
    `beside` as in `write_policy`.

    Collective: each tensor is gathered from all ranks when it is asked for, so every rank exhausts `tensors`. What
    fails on one rank is raised on every rank, after all ranks have finished gathering. Then rank 0 hashes and syncs the
    whole folder, which for a large model takes longer than the others may wait in one collective.
    """
    written: list[WrittenWeights] = []

    def take() -> None:
        with taking(tensors):
            if rank_zero.is_rank_zero:
                written.append(write_weights(tensors, model_folder, folder, quant, digests=digests))

    try:
        rank_zero.everywhere(take)
    except BaseException:
        for weights in written:
            weights.remove()
        raise
    tell_when_done(rank_zero, lambda: written[0].complete(beside, fence))


def prune(policies: Path, published: int, keep: int) -> None:
    """Delete all but the published policy, the `keep` newest before it, and those that they are made from.

    Newer ones stay: they are from a future that a resumed run will write again.
    """
    older = [version for version in numbered_folders(policies) if version < published]
    kept = needed(policies, [*older[max(0, len(older) - keep) :], published])
    doomed = [version for version in older if version not in kept]
    for version in reversed(doomed):  # a delta goes before what it was made from
        remove_folder(policies / numbered(version))


def joined_digests(shares: Iterable[Sequence[Mapping[str, str]]]) -> tuple[Mapping[str, str], ...]:
    """The digests of all shares of a policy, for each rank of an engine; a share that is empty has none."""
    known = [share for share in shares if share]
    return tuple(
        {name: digest for part in ranks for name, digest in part.items()} for ranks in zip(*known, strict=True)
    )
