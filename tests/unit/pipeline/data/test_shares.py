"""A rank's share of a batch: it is what selecting from the whole would give, little else is read, and all that is read
is verified."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipeline.data.zarr_zip as zarr_reader
from pipeline.data.batch import Batch, KeptSets, Share
from pipeline.data.batch_format import Choose
from pipeline.data.routed_experts import RoutedExperts
from pipeline.data.store import BatchStore
from pipeline.data.zarr_zip import LEAST_BYTES, PIECES, chunk_digests, chunk_rows
from pipeline.errors import CorruptBatchError
from tests.support.batches import read_by
from tests.support.files import CountedFile
from tests.unit.pipeline.data.test_store import assert_same, rewrite

MakeBatch = Callable[..., Batch]
TOKEN_BYTES = 4


def large_batch(make_batch: MakeBatch, samples: int = 512, mean: int = 6_000, seed: int = 0) -> Batch:
    """As many tokens as a small cluster's batch; lengths vary as those of a reasoning model do."""
    draw = np.random.default_rng(seed)
    responses = np.clip(draw.lognormal(np.log(mean * 0.6), 1.0, samples), 16, mean * 6).astype(np.int64)
    prompts = draw.integers(50, 200, samples).astype(np.int32)
    count = int(responses.sum())
    return replace(
        make_batch(0, num_groups=0),
        tokens=draw.integers(0, 150_000, count + int(prompts.sum()), dtype=np.int32),
        sample_offsets=np.concatenate([[0], np.cumsum(responses + prompts)]),
        prompt_lengths=prompts,
        group=np.arange(samples, dtype=np.int64) // 8,
        problem=np.arange(samples, dtype=np.int64) // 8,
        rollout_logprobs=-draw.exponential(0.3, count).astype(np.float32),
        policy_version=np.zeros(count, np.int32),
        loss_mask=np.ones(count, np.bool_),
        reward=np.zeros(samples, np.float32),
        reward_parts={},
        finish=np.zeros(samples, np.uint8),
        truncated=np.zeros(samples, np.bool_),
        engine=np.zeros(samples, np.uint16),
        queued_s=np.zeros(samples, np.float32),
        generated_s=np.ones(samples, np.float32),
        next_group=samples,
    )


def small_batch(make_batch: MakeBatch) -> Batch:
    """With everything that a batch may hold."""
    batch = make_batch(0)
    kept = KeptSets.of([[token, token + 1] for token in batch.response_tokens.tolist()])
    experts = RoutedExperts(
        ids=np.tile(np.array([[[1, 5]]], np.uint8), (len(batch.tokens), 1, 1)),
        known=np.ones(len(batch.tokens), np.bool_),
    )
    return replace(batch, kept=kept, experts=experts, contract=replace(batch.contract, kept_set=True))


def share_of(held: np.ndarray) -> Share:
    """One rank of two, which takes these samples."""
    return Share(ranks=np.where(held, 0, 1), rank=0)


def choosing(held: np.ndarray) -> Choose:
    return lambda outline: share_of(held)


def halves(outline: Batch) -> Share:
    """Of the samples, the second to the middle and the last."""
    numbers, count = np.arange(outline.num_samples), outline.num_samples
    return share_of(((numbers > 0) & (numbers < count // 2)) | (numbers == count - 1))


def bare(batch: Batch) -> Batch:
    """Without what has no `==`."""
    return replace(batch, kept=None, experts=None, share=None)


def test_a_rank_of_four_reads_less_than_a_third_of_the_file(
    tmp_path: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, batch = BatchStore(tmp_path), large_batch(make_batch)
    size = store.commit(batch).stat().st_size
    monkeypatch.setattr(zarr_reader, "open_regular", lambda path: CountedFile(path.open("rb", buffering=0)))
    for rank in range(4):
        CountedFile.num_bytes = 0
        edges = np.linspace(0, len(batch.tokens), 5)
        own = np.searchsorted(edges, (batch.sample_offsets[:-1] + batch.sample_offsets[1:]) / 2) == rank + 1
        share = store.read(0, batch.contract, choose=choosing(own))
        assert 0.2 * size < CountedFile.num_bytes <= 0.3 * size, (
            f"rank {rank} read {CountedFile.num_bytes} of {size} bytes"
        )
        assert share.tokens.nbytes <= 0.3 * batch.tokens.nbytes
        assert_same(share.alone(), batch.select(own))


def test_a_share_is_what_selecting_from_the_whole_gives(tmp_path: Path, make_batch: MakeBatch) -> None:
    store, batch = BatchStore(tmp_path), small_batch(make_batch)
    store.commit(batch)
    for held in ([1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1], [0] * 6, [1] * 6):
        chosen = np.array(held, np.bool_)
        share = store.read(0, None, choose=choosing(chosen))
        expected = read_by(batch, share_of(chosen))
        for found, wanted in ((share, expected), (share.alone(), batch.select(chosen))):
            assert found.kept is not None
            assert wanted.kept is not None
            assert found.experts is not None
            assert wanted.experts is not None
            np.testing.assert_array_equal(found.kept.tokens, wanted.kept.tokens)
            np.testing.assert_array_equal(found.kept.offsets, wanted.kept.offsets)
            np.testing.assert_array_equal(found.experts.ids, wanted.experts.ids)
            assert_same(bare(found), bare(wanted))
        half = np.arange(6) < 4
        np.testing.assert_array_equal(share.select(half).tokens, batch.select(half & chosen).tokens)
        assert np.flatnonzero(share.select(half).held).tolist() == np.flatnonzero(chosen[:4]).tolist()


def test_a_share_is_asked_for_by_what_is_counted_in_samples(tmp_path: Path, make_batch: MakeBatch) -> None:
    store, batch = BatchStore(tmp_path), make_batch(0)
    store.commit(batch)
    told: list[Batch] = []

    def choose(outline: Batch) -> Share:
        told.append(outline)
        return share_of(outline.lengths > 3)

    share = store.read(0, None, choose=choose)
    (outline,) = told
    assert len(outline.tokens) == 0
    for name in ("lengths", "response_lengths", "reward", "group", "truncated"):
        np.testing.assert_array_equal(getattr(outline, name), getattr(batch, name))
    assert share.num_samples == 6
    assert share.reward.tolist() == batch.reward.tolist()
    assert share.response_lengths.tolist() == batch.response_lengths.tolist()
    assert len(share.tokens) == batch.lengths[batch.lengths > 3].sum()


def test_each_flipped_bit_is_found_or_was_not_read(tmp_path: Path, make_batch: MakeBatch) -> None:
    store, batch = BatchStore(tmp_path), small_batch(make_batch)
    path = store.commit(batch)
    good, draw = path.read_bytes(), random.Random(14)
    expected, found = store.read(0, None, choose=halves), 0
    for _ in range(600):
        damaged = bytearray(good)
        damaged[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            share = store.read(0, None, choose=halves)
        except CorruptBatchError:
            found += 1
            continue
        assert share.experts is not None
        assert expected.experts is not None
        assert_same(bare(share), bare(expected))
        np.testing.assert_array_equal(share.experts.ids, expected.experts.ids)
    assert found > 200


def test_a_chunk_of_another_batch_is_found_though_its_own_checksum_is_right(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    store, batch = BatchStore(tmp_path), large_batch(make_batch, samples=64)
    other = BatchStore(tmp_path / "other").commit(large_batch(make_batch, samples=64, seed=1))
    path = store.commit(batch)
    foreign: dict[str, bytes] = {}
    rewrite(other, lambda members: foreign.update(members))
    last = chunk_key_of_the_last(batch)
    rewrite(path, lambda members: members.update({last: foreign["tokens/c/0"]}))
    first = np.arange(64) < 8
    store.read(0, None, choose=choosing(first))  # it lies in the share of another rank
    for choose in (choosing(~first), None):
        with pytest.raises(CorruptBatchError, match=r"content digest differs: chunk \d+ of tokens"):
            store.read(0, None, choose=choose)


def chunk_key_of_the_last(batch: Batch) -> str:
    rows = chunk_rows(batch.tokens.shape, batch.tokens.dtype)
    return f"tokens/c/{len(batch.tokens) // rows - 1}"


def test_values_that_cannot_be_are_named_by_the_sample_of_the_whole_batch(
    tmp_path: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, batch = BatchStore(tmp_path), make_batch(0)
    reward = batch.reward.copy()
    reward[4] = np.inf
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.data.store.check_values", lambda batch, limits: None)
        store.commit(replace(batch, reward=reward))
    with pytest.raises(CorruptBatchError, match="sample 4: its reward is no finite number"):
        store.read(0, None, choose=choosing(np.arange(6) >= 3))
    store.read(0, None, choose=choosing(np.arange(6) < 3))


@pytest.mark.parametrize(
    ("shape", "dtype", "rows"),
    [
        ((0,), np.int32, 1),
        ((100,), np.int32, 100),
        ((LEAST_BYTES // TOKEN_BYTES + 1,), np.int32, LEAST_BYTES // TOKEN_BYTES),
        ((6_600_000,), np.int32, -(-6_600_000 // PIECES)),
        ((6_600_000,), np.bool_, LEAST_BYTES),
        ((10_000, 48, 8), np.uint8, LEAST_BYTES // 384 + 1),
        ((2, 0), np.float32, 2),
    ],
)
def test_chunks_are_neither_many_nor_large(shape: tuple[int, ...], dtype: Any, rows: int) -> None:
    assert chunk_rows(shape, np.dtype(dtype)) == rows


def test_digests_are_of_the_raw_bytes_of_each_chunk() -> None:
    array = np.arange(LEAST_BYTES // 2, dtype=np.int32)
    parts = [chunk_digests(part) for part in (array[: len(array) // 2], array[len(array) // 2 :])]
    assert chunk_digests(array) == [*parts[0], *parts[1]]
    assert chunk_digests(array.astype(">i4")) == chunk_digests(array)
    assert chunk_digests(np.zeros((2, 0), np.float32)) == []
