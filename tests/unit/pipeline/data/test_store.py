"""The store: what is committed comes back bit for bit, and damage never comes back as data."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.storage import ZipStore

from pipeline.data.batch import Batch, DroppedGroup, LogprobContract, Share
from pipeline.data.batch_format import (
    PER_SAMPLE,
    PER_TOKEN,
    SCHEMA_VERSION,
    arrays_of,
    attributes_of,
    check_attributes,
    with_digests,
)
from pipeline.data.epochs import claim
from pipeline.data.files import remove_leftovers
from pipeline.data.run_directory import unfenced
from pipeline.data.store import LOST_SUFFIX, BatchStore, LostBatch
from pipeline.errors import (
    CorruptBatchError,
    DeadlineExceededError,
    RetryableError,
    StoreError,
    SupersededError,
)
from tests.support.examples import examples
from tests.support.files import sealed_zip

MakeBatch = Callable[..., Batch]


def assert_same(left: Batch, right: Batch) -> None:
    """Equal field by field and bit by bit, NaN included."""
    for field in fields(Batch):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        if field.name == "reward_parts":
            assert ours.keys() == theirs.keys()
            pairs = [(ours[name], theirs[name]) for name in ours]
        elif isinstance(ours, np.ndarray):
            pairs = [(ours, theirs)]
        else:
            assert ours == theirs, field.name
            continue
        for mine, other in pairs:
            assert (mine.dtype, mine.shape, mine.tobytes()) == (other.dtype, other.shape, other.tobytes()), field.name


def test_round_trip_keeps_every_bit(tmp_path: Path, make_batch: MakeBatch, contract: LogprobContract) -> None:
    store, batch = BatchStore(tmp_path / "batches"), make_batch(12, dropped=(2, 5), next_group=6)
    path = store.commit(batch)
    assert path == tmp_path / "batches" / "000012.zarr.zip"
    assert os.listdir(store.directory) == ["000012.zarr.zip"]
    found = store.read(12, contract)
    assert_same(found, batch)
    assert found.response_lengths.tolist() == [3, 1, 1, 3, 1, 1]
    assert np.isnan(found.reward_parts["format"][:2]).all()
    assert found.reward_parts["odd/name ü"][2] == 1.0


def test_round_trip_of_a_batch_of_several_sources(tmp_path: Path, make_batch: MakeBatch) -> None:
    batch = replace(make_batch(0), sources=dict(math=range(9), chat=range(9, 30)))
    store = BatchStore(tmp_path)
    store.commit(batch)
    assert_same(store.read(0, None), batch)
    assert "sources" not in attributes_of(make_batch(0)), "files of one source are as they were"
    attributes = with_digests(attributes_of(batch), arrays_of(batch))
    check_attributes(attributes)
    for damaged in ({"": [0, 9]}, {"math": [0]}, {"math": [-1, 9]}, {"a/b": [0, 9]}, ["math"]):
        with pytest.raises(ValueError, match="attributes are damaged"):
            check_attributes({**attributes, "sources": damaged})


def test_round_trip_of_a_batch_whose_answers_were_compared(tmp_path: Path, make_batch: MakeBatch) -> None:
    batch = replace(make_batch(0), bias=dict(trained_shorter=0.25, issued_length_p50=900.5))
    store = BatchStore(tmp_path)
    store.commit(batch)
    assert_same(store.read(0, None), batch)
    assert "bias" not in attributes_of(make_batch(0)), "others are as they were"
    with pytest.raises(ValueError, match="attributes are damaged"):
        check_attributes({**with_digests(attributes_of(batch), arrays_of(batch)), "bias": {"trained_shorter": "much"}})


def test_the_number_of_samples_is_that_of_the_batch(tmp_path: Path, make_batch: MakeBatch) -> None:
    store = BatchStore(tmp_path)
    store.commit(make_batch(0, num_groups=3))
    assert store.num_samples(0) == store.read(0, None).num_samples == 9
    store.path(0).write_bytes(store.path(0).read_bytes().replace(b'"index": 0', b'"index": 1'))
    for index in (0, 1):  # changed, gone
        with pytest.raises(CorruptBatchError, match=f"{index:06d}.zarr.zip fails its checks"):
            store.num_samples(index)


@given(data=st.data())
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip_of_any_batch(tmp_path: Path, make_batch: MakeBatch, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6))
    count, responses = len(lengths), sum(response for _, response in lengths)
    logprobs, rewards = st.floats(-128.0, 0.0, width=32), st.floats(width=32, allow_nan=False, allow_infinity=False)
    batch = replace(
        make_batch(0, num_groups=0),
        tokens=np.arange(sum(map(sum, lengths)), dtype=np.int32),
        sample_offsets=np.cumsum([0, *map(sum, lengths)], dtype=np.int64),
        prompt_lengths=np.array([prompt for prompt, _ in lengths], np.int32),
        group=np.sort(np.arange(count, dtype=np.int64) // 2),
        rollout_logprobs=np.array(data.draw(st.lists(logprobs, min_size=responses, max_size=responses)), np.float32),
        policy_version=np.arange(responses, dtype=np.int32),
        loss_mask=np.ones(responses, np.bool_),
        problem=np.full(count, -1, np.int64),
        reward=np.array(data.draw(st.lists(rewards, min_size=count, max_size=count)), np.float32),
        reward_parts={"a": np.full(count, np.nan, np.float32), "b c": np.zeros(count, np.float32)},
        finish=np.arange(count, dtype=np.uint8) % 2,
        truncated=np.arange(count) % 2 == 0,
        engine=np.full(count, 65535, np.uint16),
        queued_s=np.zeros(count, np.float32),
        generated_s=np.ones(count, np.float32),
        next_group=count,
    )
    store = BatchStore(tmp_path)
    store.path(0).unlink(missing_ok=True)
    store.commit(batch)
    assert_same(store.read(0, None), batch)


def test_the_file_is_a_zarr_group_that_anyone_can_open(tmp_path: Path, make_batch: MakeBatch) -> None:
    path = BatchStore(tmp_path).commit(make_batch(3, dropped=(2,)))
    with ZipStore(path, mode="r") as archive:
        group = zarr.open_group(archive, mode="r")
        assert sorted(group.array_keys()) == sorted([*PER_TOKEN, *PER_SAMPLE, "reward_parts"])
        assert {name: str(group[name].dtype) for name in PER_TOKEN} == PER_TOKEN
        assert group.attrs["next_group"] == 3
        assert group.attrs["dropped"] == [
            {"group": 2, "reason": "too long", "kind": "unfit", "problem": -1, "samples": 0, "solved": 0}
        ]
        assert group.attrs["contract"]["temperature"] == 0.7
        assert all("Crc32c" in str(array.compressors) for _, array in group.arrays())


def test_equal_batches_give_equal_bytes(tmp_path: Path, make_batch: MakeBatch) -> None:
    first, second = (BatchStore(tmp_path / name).commit(make_batch()) for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_a_committed_batch_is_never_overwritten(tmp_path: Path, make_batch: MakeBatch) -> None:
    store = BatchStore(tmp_path)
    before = store.commit(make_batch(0)).read_bytes()
    with pytest.raises(RetryableError, match="committed already, at"):
        store.commit(make_batch(0, num_groups=1))
    assert store.path(0).read_bytes() == before


def test_of_two_committers_the_second_loses(
    tmp_path: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked before either commits."""
    first, second = BatchStore(tmp_path), BatchStore(tmp_path)
    before = first.commit(make_batch(0)).read_bytes()
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(RetryableError, match="earlier start of the collector"):
        second.commit(make_batch(0, num_groups=1))
    assert second.path(0).read_bytes() == before
    assert os.listdir(tmp_path) == ["000000.zarr.zip"]


def test_a_superseded_collector_commits_nothing(tmp_path: Path, make_batch: MakeBatch) -> None:
    old = claim(tmp_path, "collector")
    thawed = BatchStore(tmp_path / "batches", old.check)
    thawed.commit(make_batch(0))
    new = claim(tmp_path, "collector")
    with pytest.raises(SupersededError, match="start 2 has taken over"):
        thawed.commit(make_batch(1))
    with pytest.raises(SupersededError):
        thawed.commit(make_batch(0))
    with pytest.raises(SupersededError):
        remove_leftovers(thawed.directory, thawed._fence)
    assert os.listdir(thawed.directory) == ["000000.zarr.zip"]
    BatchStore(tmp_path / "batches", new.check).commit(make_batch(1))


def test_a_superseded_write_that_was_cleared_away_says_so(
    tmp_path: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence lets it through, then a later collector starts and clears, and only then comes the link."""
    slow = BatchStore(tmp_path / "batches", claim(tmp_path, "collector").check)
    link = os.link

    def linked_late(source: Path, target: Path) -> None:
        if target.parent.name == "batches":
            later = claim(tmp_path, "collector")
            remove_leftovers(tmp_path / "batches", later.check)
            assert os.listdir(slow.directory) == []
        link(source, target)

    monkeypatch.setattr(os, "link", linked_late)
    with pytest.raises(SupersededError):
        slow.commit(make_batch(0))
    assert os.listdir(slow.directory) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(reward=np.zeros(6)), "reward is float64"),
        (dict(reward=np.zeros(5, np.float32)), "reward has 5 entries, expected 6"),
        (dict(sample_offsets=np.array([0, 5, 3, 7, 10, 13, 16], np.int64)), "sample_offsets does not rise"),
        (dict(sample_offsets=np.array([0, 5, 7, 10], np.int64)), "sample_offsets has 4 entries"),
        (dict(prompt_lengths=np.array([2, 4, 2, 2, 2, 2], np.int32)), "prompt is longer than its sample"),
        (dict(prompt_lengths=np.array([1, 2, 2, 2, 2, 2], np.int32)), "rollout_logprobs has 10 entries, expected 11"),
        (dict(policy_version=np.zeros(9, np.int32)), "policy_version has 9 entries"),
        (dict(finish=np.array([0, 0, 3, 0, 0, 0], np.uint8)), "finish holds 3"),
        (dict(group=np.array([0, 1, 0, 0, 1, 1], np.int64)), "not adjacent"),
        (dict(next_group=1), "group 1 is not below next_group 1"),
        (dict(open_groups=(2,)), "group 2 is not below next_group 2"),
        (dict(open_groups=(1,)), "a group of this very batch"),
        (dict(open_groups=(6, 5), next_group=7), "not ascending"),
        (dict(loss_mask=np.zeros(10, np.bool_)), "a token outside loss_mask has a log-probability"),
        (dict(loss_mask=np.ones(9, np.bool_)), "loss_mask has 9 entries"),
        (dict(reward_parts={"a": np.zeros(2, np.float32)}), "reward part a is float32"),
    ],
)
def test_arrays_that_disagree_are_not_committed(
    tmp_path: Path, make_batch: MakeBatch, change: dict[str, object], message: str
) -> None:
    store = BatchStore(tmp_path)
    with pytest.raises((StoreError, ValueError), match=message):
        store.commit(replace(make_batch(0), **change))
    assert os.listdir(tmp_path) == []


def test_ragged_arrays_that_disagree_are_not_read(
    tmp_path: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign writer may give a wrong batch a right digest."""
    store = BatchStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.data.store.check_batch", lambda batch: None)
        patch.setattr("pipeline.data.store.check_values", lambda batch, limits: None)
        store.commit(replace(make_batch(0), policy_version=np.zeros(9, np.int32)))
    with pytest.raises(CorruptBatchError, match="policy_version has 9 entries"):
        store.read(0, None)


def rewrite(path: Path, change: Callable[[dict[str, bytes]], None], *, sealed: bool = True) -> None:
    """Change the members of a zip; the new one is a whole and valid zip, with its checksum if it is `sealed`."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    if sealed:
        path.write_bytes(sealed_zip(path.read_bytes()))


def test_a_missing_chunk_is_not_read_as_zeros(tmp_path: Path, make_batch: MakeBatch) -> None:
    store = BatchStore(tmp_path)
    path = store.commit(make_batch(0))
    rewrite(path, lambda members: members.pop("rollout_logprobs/c/0"))  # type: ignore[arg-type, return-value]
    with ZipStore(path, mode="r") as archive:
        assert not np.any(zarr.open_group(archive, mode="r")["rollout_logprobs"][:])  # what Zarr alone would say
    with pytest.raises(CorruptBatchError, match=r"rollout_logprobs/c/0"):
        store.read(0, None)


def test_a_chunk_with_a_flipped_bit_fails_its_own_checksum(tmp_path: Path, make_batch: MakeBatch) -> None:
    def flip(members: dict[str, bytes]) -> None:
        chunk = bytearray(members["tokens/c/0"])
        chunk[len(chunk) // 2] ^= 1
        members["tokens/c/0"] = bytes(chunk)

    store = BatchStore(tmp_path)
    rewrite(store.commit(make_batch(0)), flip)
    with pytest.raises(CorruptBatchError, match="checksum"):
        store.read(0, None)


def test_a_changed_attribute_fails_the_digest(tmp_path: Path, make_batch: MakeBatch) -> None:
    def relabel(members: dict[str, bytes]) -> None:
        members["zarr.json"] = members["zarr.json"].replace(b'"temperature": 0.7', b'"temperature": 0.8')

    store = BatchStore(tmp_path)
    rewrite(store.commit(make_batch(0)), relabel)
    with pytest.raises(CorruptBatchError, match="content digest"):
        store.read(0, None)


def test_another_schema_version_is_named(tmp_path: Path, make_batch: MakeBatch) -> None:
    store = BatchStore(tmp_path)
    for index, other in enumerate((SCHEMA_VERSION - 1, SCHEMA_VERSION + 1)):
        versions = [f'"schema_version": {version}'.encode() for version in (SCHEMA_VERSION, other)]

        def change(members: dict[str, bytes], versions: Sequence[bytes] = versions) -> None:
            members["zarr.json"] = members["zarr.json"].replace(*versions)

        rewrite(store.commit(make_batch(index)), change)
        with pytest.raises(CorruptBatchError, match=f"schema version {other}, this program reads {SCHEMA_VERSION}"):
            store.read(index, None)


def test_a_file_without_its_checksum_is_refused(tmp_path: Path, make_batch: MakeBatch) -> None:
    store = BatchStore(tmp_path)
    rewrite(store.commit(make_batch(0)), lambda members: None, sealed=False)
    everyone = Share(ranks=np.zeros(6, np.int64), rank=0)
    for choose in (None, lambda outline: everyone):
        with pytest.raises(CorruptBatchError, match="it does not end in its checksum"):
            store.read(0, None, choose=choose)


def test_forced_tokens_and_open_groups_come_back(tmp_path: Path, make_batch: MakeBatch) -> None:
    """Six samples of 3, 1, 1, 3, 1, 1 tokens; the third and the eighth token are forced."""
    batch = make_batch(0, next_group=20, open_groups=(2, 3, 4, 6, 17, 18, 19))
    forced = np.array([0, 0, 1, 0, 0, 0, 0, 1, 0, 0], np.bool_)
    batch = replace(
        batch, loss_mask=~forced, rollout_logprobs=np.where(forced, np.float32(0.0), batch.rollout_logprobs)
    )
    store = BatchStore(tmp_path)
    path = store.commit(batch)
    assert_same(store.read(0, None), batch)
    assert (batch.num_response_tokens, batch.num_sampled_tokens) == (10, 8)
    assert batch.interrupted.tolist() == [True, False, False, True, False, False]
    with ZipStore(path, mode="r") as archive:
        assert zarr.open_group(archive, mode="r").attrs["open_groups"] == [[2, 5], [6, 7], [17, 20]]


def test_a_file_under_another_batchs_name_is_refused(tmp_path: Path, make_batch: MakeBatch) -> None:
    store = BatchStore(tmp_path)
    store.commit(make_batch(0)).rename(store.path(1))
    with pytest.raises(CorruptBatchError, match=r"000001.zarr.zip fails its checks \(the file holds batch 0\)"):
        store.read(1, None)


def test_every_truncation_is_detected(tmp_path: Path, make_batch: MakeBatch) -> None:
    store = BatchStore(tmp_path)
    path = store.commit(make_batch(0))
    whole = path.read_bytes()
    lengths = {0, 1, 22, len(whole) - 1, len(whole) - 22, *random.Random(0).sample(range(len(whole)), 150)}
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptBatchError, match=r"000000\.zarr\.zip fails its checks .* `evenkeel repair "):
            store.read(0, None)


def lost(index: int, **changes: Any) -> LostBatch:
    fields: dict[str, Any] = dict(reason="flipped", recorded="now", learned=True, groups=(2, 3), known="all")
    return LostBatch(**{**fields, "index": index, "next_group": 6, "open_groups": (4, 5), **changes})


def test_a_lost_batch_keeps_its_place(tmp_path: Path, make_batch: MakeBatch) -> None:
    store = BatchStore(tmp_path)
    store.commit(make_batch(0))
    lost(1).write(store.lost_path(1))
    assert (store.committed(), store.settled(), store.next_index, store.holes(99)) == ([0], [0, 1], 2, [])
    assert store.groups_to_ask() == (6, (4, 5))
    assert store.gone(1) == lost(1)
    assert store.all_lost() == [lost(1)]
    with pytest.raises(StoreError, match=r"batch 1 was lost by damage \(flipped; recorded now\)"):
        store.read(1, None)
    with pytest.raises(FileExistsError):
        lost(1, reason="other").write(store.lost_path(1))


def test_a_read_lists_nothing(tmp_path: Path, make_batch: MakeBatch, count_listings: Counter[str]) -> None:
    store = BatchStore(tmp_path)
    store.commit(make_batch(0))
    lost(1).write(store.lost_path(1))
    store.commit(make_batch(2))
    count_listings.clear()
    store.read(0, None)
    store.read(2, None, visible_s=1.0)
    for index in (1, 3):
        with pytest.raises(StoreError):
            store.read(index, None)
    assert count_listings[str(tmp_path)] == 1, "to say which are there, in the place of batch 3"


def test_a_hundred_looks_for_the_next_of_a_thousand_batches_list_them_once(
    tmp_path: Path, count_listings: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing takes two seconds here, and a look is made each second."""
    reader, now, listdir = BatchStore(tmp_path), [0.0], os.listdir
    for index in range(1000):
        reader.path(index).touch()

    def slow(path: Path) -> list[str]:
        now[0] += 2.0
        return listdir(path)

    monkeypatch.setattr(os, "listdir", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for _ in range(100):
        assert not reader.is_settled(1000)
        now[0] += 1.0
    assert count_listings[str(tmp_path)] == 1
    reader.path(1000).touch()
    assert reader.is_settled(1000)
    assert count_listings[str(tmp_path)] == 1


def test_what_another_process_removes_or_repairs_is_seen_at_the_next_look(
    tmp_path: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, other = BatchStore(tmp_path), BatchStore(tmp_path)
    monkeypatch.setattr(reader, "settled", list)  # by the names alone
    for index in (0, 2):
        other.commit(make_batch(index))
    assert [reader.is_settled(index) for index in range(4)] == [True, False, True, False]
    other.path(0).rename(tmp_path / "000000.zarr.zip.damaged")
    assert not reader.is_settled(0)
    lost(0).write(other.lost_path(0))
    other.commit(make_batch(1))
    assert [reader.is_settled(index) for index in range(4)] == [True, True, True, False]


def test_a_new_batch_is_seen_where_the_mount_remembers_that_it_was_missing(
    tmp_path: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = BatchStore(tmp_path)
    monkeypatch.setattr("pipeline.data.store.is_there", lambda path: False)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)  # a listing that takes no time is repeated at each look
    assert not reader.is_settled(0)
    reader.commit(make_batch(0))
    assert reader.is_settled(0)


def test_a_copy_put_back_of_a_lost_batch_stays_lost(tmp_path: Path, make_batch: MakeBatch) -> None:
    """Its step was skipped: nothing may read it from then on."""
    store = BatchStore(tmp_path)
    store.commit(make_batch(0))
    lost(0).write(store.lost_path(0))
    with pytest.raises(StoreError, match=r"batch 0 was lost by damage .* nothing to read"):
        store.read(0, None)


def test_a_damaged_record_of_a_loss_is_named(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    lost(1).write(store.lost_path(1))
    store.lost_path(1).write_text("{}")
    with pytest.raises(StoreError, match=r"000001\.lost\.json is damaged .* `evenkeel repair"):
        store.gone(1)


def test_holes_are_what_is_to_be_made_below_the_newest(tmp_path: Path, make_batch: MakeBatch) -> None:
    store = BatchStore(tmp_path)
    assert store.holes(99) == []
    for index in (1, 4):
        store.commit(make_batch(index))
    lost(3).write(store.lost_path(3))
    assert (store.holes(99), store.next_index) == ([0, 2], 0)


@given(position=st.integers(0, 2**32), bit=st.integers(0, 7))
@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_is_detected_or_harmless(tmp_path: Path, make_batch: MakeBatch, position: int, bit: int) -> None:
    store, batch = BatchStore(tmp_path), make_batch(0)
    if not store.path(0).exists():
        (tmp_path / "whole").write_bytes(store.commit(batch).read_bytes())
    damaged = bytearray((tmp_path / "whole").read_bytes())
    damaged[position % len(damaged)] ^= 1 << bit
    store.path(0).write_bytes(damaged)
    try:
        found = store.read(0, None)
    except CorruptBatchError:
        return
    assert_same(found, batch)


def test_another_contract_is_refused_by_its_differing_fields(
    tmp_path: Path, make_batch: MakeBatch, contract: LogprobContract
) -> None:
    store = BatchStore(tmp_path)
    store.commit(make_batch(0))
    with pytest.raises(StoreError, match=r"temperature 0\.7 \(expected 1\.0\), top_k -1 \(expected"):
        store.read(0, replace(contract, temperature=1.0, top_k=8))
    assert store.read(0, contract).index == 0


PARTIAL = ".000002.zarr.zip.host-0123456789ab.tmp"


def test_listing_ignores_what_is_not_a_batch(tmp_path: Path, make_batch: MakeBatch) -> None:
    store = BatchStore(tmp_path)
    assert (store.committed(), store.next_index, store.groups_to_ask()) == ([], 0, (0, ()))
    for index in (0, 1, 3):
        store.commit(
            make_batch(index, first_group=10 * index, next_group=10 * index + 10, open_groups=(10 * index + 9,))
        )
    for name in ("notes.txt", "000002.zarr.zip.bak", PARTIAL):
        (tmp_path / name).touch()
    assert store.committed() == [0, 1, 3]
    assert (store.next_index, store.groups_to_ask()) == (2, (20, (19,)))  # batch 2 was taken away: it is made again
    remove_leftovers(store.directory, unfenced)
    assert not (tmp_path / PARTIAL).exists()
    assert store.committed() == [0, 1, 3]


def test_a_missing_batch_is_named(tmp_path: Path, make_batch: MakeBatch) -> None:
    store = BatchStore(tmp_path)
    with pytest.raises(StoreError, match=r"batch 4 is not committed: no file .*; start the collector to make"):
        store.read(4, None)
    for index in range(3):
        store.commit(make_batch(index))
    with pytest.raises(StoreError, match=r"batch 4 is not committed: no file .*; batches 0 to 2 are there"):
        store.read(4, None)


def test_a_batch_that_another_host_committed_may_be_seen_late(tmp_path: Path, make_batch: MakeBatch) -> None:
    store = BatchStore(tmp_path)
    writer = threading.Timer(0.2, store.commit, [make_batch(0)])
    writer.start()
    assert_same(store.read(0, None, visible_s=20.0), make_batch(0))
    writer.join()
    with pytest.raises(DeadlineExceededError, match="is not seen here"):
        store.read(1, None, visible_s=0.05)


COMMITTER = """
import os, signal, sys
from pathlib import Path
import numpy as np
import pipeline.data.store
from pipeline.data.batch import DroppedGroup
from pipeline.data.batch import Batch, LogprobContract
from pipeline.data.epochs import claim
from pipeline.data.store import BatchStore

store, moment = BatchStore(Path(sys.argv[1])), sys.argv[2]

def batch(index):
    contract = LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256="")
    return Batch.from_groups(index, [], contract=contract, dropped=[], next_group=0, recipe_sha256="")

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

if moment == "loop":
    print("ready", flush=True)
    for index in range(100_000):
        store.commit(batch(index))
store.commit(batch(0))
if moment == "half a write":
    def half(file, *content):
        file.write(b"PK" + bytes(1000))
        file.flush()
        die()
    pipeline.data.store.write_zarr_zip = half
else:
    setattr(os, moment, die)
store.commit(batch(1))
"""


@pytest.mark.parametrize("moment", ["half a write", "fsync", "link"])
def test_a_kill_during_commit_leaves_no_visible_half_batch(tmp_path: Path, moment: str) -> None:
    died = subprocess.run([sys.executable, "-c", COMMITTER, str(tmp_path), moment], timeout=120, check=False)
    assert died.returncode == -signal.SIGKILL
    store = BatchStore(tmp_path)
    assert store.committed() == [0]
    assert store.read(0, None).index == 0
    assert len(os.listdir(tmp_path)) == 2
    remove_leftovers(store.directory, unfenced)
    assert os.listdir(tmp_path) == ["000000.zarr.zip"]


def test_kills_at_any_moment_leave_only_whole_batches(tmp_path: Path) -> None:
    for attempt, delay_s in enumerate((0.02, 0.11, 0.23)):
        directory = tmp_path / str(attempt)
        with subprocess.Popen(
            [sys.executable, "-c", COMMITTER, str(directory), "loop"], stdout=subprocess.PIPE
        ) as committer:
            assert committer.stdout is not None
            assert committer.stdout.readline() == b"ready\n"
            time.sleep(delay_s)
            committer.kill()
        store = BatchStore(directory)
        assert store.committed() == list(range(len(store.committed())))
        for index in store.committed():
            assert store.read(index, None).index == index


def test_names_that_are_no_numbers_of_ours_record_no_lost_batch(tmp_path: Path) -> None:
    for name in ("٠٠٠٠٠٣", "0000000005", "000006 "):
        (tmp_path / f"{name}{LOST_SUFFIX}").write_text("left by somebody else")
    store = BatchStore(tmp_path)
    assert store.settled() == []
    assert store.all_lost() == []


def test_a_batch_passes_over_most_of_an_epoch(tmp_path: Path, make_batch: MakeBatch) -> None:
    """Its attributes, which readers bound, could hold some 80,000 of them."""
    passed = tuple(DroppedGroup.passed_over(group, 2 * group + 1) for group in range(2, 200_002))
    odd = DroppedGroup(group=200_002, reason="problem 1 is solved: 2 of 2 samples solved", kind="solved", problem=1)
    unfit = DroppedGroup(group=200_003, reason="too long")
    batch = replace(make_batch(0), dropped=(*passed, odd, unfit), next_group=200_004)
    store = BatchStore(tmp_path)
    store.commit(batch)
    assert_same(store.read(0, None), batch)
    share = store.read(0, None, choose=lambda whole: Share(ranks=np.zeros(whole.num_samples, np.int64), rank=0))
    assert share.dropped == batch.dropped


def test_a_file_that_readers_refuse_is_not_committed(tmp_path: Path, make_batch: MakeBatch) -> None:
    with (
        patch("pipeline.data.store.read_attributes", side_effect=ValueError("its attributes are odd")),
        pytest.raises(StoreError, match=r"refused to commit batch 0: .* read back \(its attributes are odd"),
    ):
        BatchStore(tmp_path).commit(make_batch(0))
    assert os.listdir(tmp_path) == []
