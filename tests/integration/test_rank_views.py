"""Ranks that see the run directory differently, over real gloo: they decide alike, and none waits for ever."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.data.batch import Share
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import DeadlineExceededError, StoppedError
from tests.support.batches import batch_of_rewards
from tests.support.ranks import Ranks

SEEN_AFTER_S = 1.0
DEADLINE_S = 30.0


def data_ranks() -> Any:
    """A learner of two data parallel ranks, which take every other sample."""
    import torch
    import torch.distributed as dist

    from megatron_bridge.parallel.rank_sync import RankSync

    class DataRanks(RankSync):
        num_data_ranks = 2

        def share(self, lengths: Any, together: Any) -> Share:
            return Share(ranks=np.arange(len(lengths)) % 2, rank=dist.get_rank())

        def sum_of_shares(self, values: Any) -> Any:
            summed = torch.from_numpy(values.astype(np.float64))
            dist.all_reduce(summed)
            return summed.numpy().astype(values.dtype)

    return DataRanks(DEADLINE_S)


def wait_for_batch(folder: Path, case: str) -> tuple[str, float]:
    """Rank 1 sees nothing of the run for a while, or ever. What came of the wait, and how long it took."""
    import torch.distributed as dist

    from pipeline.trainer.batches import BatchSource

    rank = dist.get_rank()
    run = RunDirectory(folder / "run")
    learner = data_ranks()
    if rank == 1:
        run = RunDirectory(folder / "not yet mounted")
    store = BatchStore(run.batches)
    if rank == 1 and case == "late":
        threading.Timer(
            SEEN_AFTER_S, lambda: store.path(0).symlink_to(BatchStore(folder / "run" / "batches").path(0))
        ).start()
    source = BatchSource(
        run=run,
        store=store,
        learner=learner,
        contract=None,  # type: ignore[arg-type]
        wait_deadline_s=5.0,
        # Rank 1 would stop, were it asked.
        stop_requested=lambda: rank == 1 or case == "stop",
        visible_s=2.0 if case == "never" else 20.0,
    )
    started = time.monotonic()
    try:
        batch = source.wait(0)
        own = range(rank, batch.num_samples, 2)
        assert np.flatnonzero(batch.held).tolist() == list(own)
        assert len(batch.tokens) == sum(batch.lengths[sample] for sample in own)
        assert batch.loss_mask.all(), "the numbers of the others' response tokens are exchanged"
        found = f"batch {batch.index}"
    except (StoppedError, DeadlineExceededError) as error:
        found = f"{type(error).__name__}: {error}"
    return found, time.monotonic() - started


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("late", "batch 0"),
        pytest.param("never", "DeadlineExceededError", marks=pytest.mark.slow),
        ("stop", "StoppedError"),
    ],
)
def test_all_ranks_do_what_rank_zero_says(tmp_path: Path, case: str, expected: str) -> None:
    BatchStore(tmp_path / "run" / "batches").commit(batch_of_rewards([[1.0, 0.0]]))
    with Ranks(2, wait_for_batch, tmp_path, case) as ranks:
        found = ranks.results()
    assert [text.partition(":")[0] for text, _ in found] == [expected] * 2
    assert all(seconds < DEADLINE_S / 2 for _, seconds in found), "no rank ran into a collective's deadline"
