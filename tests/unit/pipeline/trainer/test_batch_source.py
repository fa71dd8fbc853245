"""Rank 0 waits for a batch and tells the others; what ends its wait ends theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.batch import Batch
from pipeline.data.epochs import claim
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore, LostBatch
from pipeline.errors import DeadlineExceededError, StoppedError, SupersededError
from pipeline.trainer import batch_source
from pipeline.trainer.batch_source import STOP_FILE_VARIABLE, BatchSource
from tests.support.one_rank import OneRank

MakeBatch = Callable[..., Batch]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.make_folders()
    return run


def index_of(batch: Batch | None) -> int:
    assert batch is not None
    return batch.index


def source(run: RunDirectory, **changes: Any) -> BatchSource:
    fields: dict[str, Any] = dict(
        run=run, store=BatchStore(run.batches), learner=OneRank(), contract=None, wait_deadline_s=20.0
    )
    return BatchSource(**fields | changes)


def test_a_batch_is_read_once_it_is_there(
    run: RunDirectory, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_source, "ANSWER_S", 0.05)  # several rounds
    writer = threading.Timer(0.3, BatchStore(run.batches).commit, [make_batch(0)])
    writer.start()
    assert index_of(source(run).wait(0)) == 0
    writer.join()


def test_other_work_goes_on_while_a_batch_is_waited_for(
    run: RunDirectory, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_source, "ANSWER_S", 0.0)
    turns: list[int] = []

    def meanwhile() -> None:
        turns.append(len(turns))
        if len(turns) == 3:
            BatchStore(run.batches).commit(make_batch(0))

    assert index_of(source(run).wait(0, meanwhile)) == 0
    assert turns == [0, 1, 2]


def test_whether_a_batch_is_there_is_known_without_waiting(run: RunDirectory, make_batch: MakeBatch) -> None:
    assert not source(run).is_there(0)
    BatchStore(run.batches).commit(make_batch(0))
    assert source(run).is_there(0)
    assert not source(run).is_there(1)


def test_a_lost_batch_is_not_waited_for(run: RunDirectory) -> None:
    store = BatchStore(run.batches)
    LostBatch(
        index=0, reason="r", recorded="now", learned=False, groups=(), known="all", next_group=0, open_groups=()
    ).write(store.lost_path(0))
    assert source(run).wait(0) is None


def test_a_request_to_stop_ends_the_wait(
    run: RunDirectory, make_batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the batch is there: the step is not begun."""
    stop = tmp_path / "stop"
    monkeypatch.setenv(STOP_FILE_VARIABLE, str(stop))
    BatchStore(run.batches).commit(make_batch(0))
    assert index_of(source(run).wait(0)) == 0
    threading.Timer(0.2, stop.touch).start()
    with pytest.raises(StoppedError, match="before batch 1; start the run again"):
        source(run).wait(1)
    with pytest.raises(StoppedError, match="before batch 0"):
        source(run).wait(0)


def test_a_collector_that_stands_still_is_not_waited_for(run: RunDirectory, make_batch: MakeBatch) -> None:
    with pytest.raises(DeadlineExceededError, match=r"waited 0\.1 s for batch 0 .* look at the collector's log"):
        source(run, wait_deadline_s=0.1).wait(0)


def test_a_collector_that_evaluates_or_commits_is_waited_for(run: RunDirectory, make_batch: MakeBatch) -> None:
    """Rank 0 looks at every deadline; each time something has happened since the one before."""
    happens = iter((
        lambda: run.write_evaluation(0, {}),
        lambda: BatchStore(run.batches).commit(make_batch(0)),
        lambda: run.write_evaluation(1, {}),
        lambda: BatchStore(run.batches).commit(make_batch(1)),
    ))  # fmt: skip

    def collector_goes_on() -> bool:
        next(happens)()
        return False

    assert index_of(source(run, wait_deadline_s=0.0, stop_requested=collector_goes_on).wait(1)) == 1


def test_a_superseded_learner_does_not_wait_on(run: RunDirectory) -> None:
    superseded = run.under(claim(run.path, "learner"))
    claim(run.path, "learner")
    with pytest.raises(SupersededError, match="start 2 has taken over"):
        source(superseded).wait(0)
