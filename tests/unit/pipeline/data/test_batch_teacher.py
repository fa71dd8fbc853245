"""A teacher's log-probabilities in a batch, in its file, and in a rank's share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.batch import Batch, Share
from pipeline.data.store import BatchStore
from pipeline.errors import StoreError
from tests.support.batches import batch_of_rewards


@pytest.fixture
def batch() -> Batch:
    plain = batch_of_rewards([[1.0, 0.0], [0.0, 1.0]], unsampled=0.3)
    logprobs = np.random.default_rng(1).normal(-3.0, 0.5, plain.num_response_tokens).astype(np.float32)
    sampled = np.where(plain.loss_mask, plain.rollout_logprobs.clip(max=-0.1), np.float32(0.0))
    taught = np.where(plain.loss_mask, logprobs, np.float32(0.0))
    return replace(plain, rollout_logprobs=sampled, teacher_logprobs=taught)


def test_they_come_back_from_the_file(tmp_path: Path, batch: Batch) -> None:
    store = BatchStore(tmp_path)
    store.commit(batch)
    found = store.read(0, None).teacher_logprobs
    assert found is not None
    assert batch.teacher_logprobs is not None
    assert found.tolist() == batch.teacher_logprobs.tolist()
    store.commit(replace(batch, index=1, teacher_logprobs=None))
    assert store.read(1, None).teacher_logprobs is None


def test_ranks_read_their_shares_and_exchange_the_numbers(tmp_path: Path, batch: Batch) -> None:
    store = BatchStore(tmp_path)
    store.commit(batch)
    halves = []
    for rank in (0, 1):
        share = Share(ranks=np.array([0, 1, 0, 1]), rank=rank)
        halves.append(store.read(0, None, choose=lambda _, share=share: share).teacher_logprobs)  # type: ignore[misc]
    assert all(half is not None and (half == 0.0).any() for half in halves)
    assert batch.teacher_logprobs is not None
    assert sum(half for half in halves if half is not None).tolist() == batch.teacher_logprobs.tolist()  # type: ignore[union-attr]
    chosen = np.array([True, False, False, True])
    kept = batch.select(chosen).teacher_logprobs
    assert kept is not None
    assert kept.tolist() == batch.teacher_logprobs[np.repeat(chosen, batch.response_lengths)].tolist()


@pytest.mark.parametrize(("value", "message"), [(np.nan, "the teacher gave a token nan"), (0.5, r"a token 0\.5")])
def test_what_cannot_be_is_not_committed(tmp_path: Path, batch: Batch, value: float, message: str) -> None:
    assert batch.teacher_logprobs is not None
    broken = batch.teacher_logprobs.copy()
    broken[np.flatnonzero(batch.loss_mask)[2]] = value
    with pytest.raises(StoreError, match=message):
        BatchStore(tmp_path).commit(replace(batch, teacher_logprobs=broken))
    with pytest.raises(StoreError, match="teacher_logprobs has"):
        BatchStore(tmp_path).commit(replace(batch, teacher_logprobs=batch.teacher_logprobs[:-1]))
