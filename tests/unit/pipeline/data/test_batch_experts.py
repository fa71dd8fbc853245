"""Routed experts in a batch and in its file."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.storage import ZipStore

from pipeline.data.batch import Batch
from pipeline.data.routed_experts import RoutedExperts
from pipeline.data.store import BatchStore
from pipeline.errors import CorruptBatchError, StoreError
from tests.support.files import sealed_zip

MakeBatch = Callable[..., Batch]


def experts_of(num_tokens: int, seed: int = 0) -> RoutedExperts:
    """Two layers, 3 of 300 experts a token; a third of the rows unknown."""
    random = np.random.default_rng(seed)
    known = random.random(num_tokens) > 0.3
    ids = np.argsort(random.random((num_tokens, 2, 300)), axis=-1)[..., :3].astype(np.uint16)
    return RoutedExperts(ids=np.where(known[:, None, None], ids, np.uint16(0)), known=known)


@pytest.fixture
def batch(make_batch: MakeBatch) -> Batch:
    plain: Batch = make_batch(0)
    return replace(plain, experts=experts_of(len(plain.tokens)))


def assert_same(found: RoutedExperts | None, expected: RoutedExperts | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.ids.dtype == expected.ids.dtype
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.known, expected.known)


def test_they_come_back_from_the_file_and_plain_zarr_reads_them(tmp_path: Path, batch: Batch) -> None:
    store = BatchStore(tmp_path)
    path = store.commit(batch)
    assert_same(store.read(0, None).experts, batch.experts)
    with ZipStore(path, mode="r") as archive:
        group = zarr.open_group(archive, mode="r")
        assert group["routed_experts"].shape == (len(batch.tokens), 2, 3)  # type: ignore[union-attr]
        assert group.attrs["optional_arrays"] == ["routed_experts", "routed_experts_known"]


def test_samples_are_selected_with_their_rows(batch: Batch) -> None:
    chosen = np.arange(batch.num_samples) % 2 == 1
    rows = np.repeat(chosen, np.diff(batch.sample_offsets))
    assert batch.experts is not None
    assert_same(batch.select(chosen).experts, batch.experts[rows])


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (lambda experts: experts[:-1], "rows, expected one for each of"),
        (lambda e: RoutedExperts(ids=e.ids.astype(np.int32), known=e.known), "expected uint8 or uint16"),
        (lambda e: RoutedExperts(ids=e.ids + np.uint16(1), known=e.known), "unknown, but not zero"),
        (lambda e: RoutedExperts(ids=np.zeros_like(e.ids), known=e.known), "names one expert twice"),
    ],
    ids=["length", "dtype", "unknown", "twice"],
)
def test_rows_that_make_no_sense_are_not_committed(
    tmp_path: Path, batch: Batch, damaged: Callable[[RoutedExperts], RoutedExperts], message: str
) -> None:
    assert batch.experts is not None
    with pytest.raises(StoreError, match=message):
        BatchStore(tmp_path).commit(replace(batch, experts=damaged(batch.experts)))


def test_a_header_that_claims_more_rows_is_refused_before_they_are_read(tmp_path: Path, batch: Batch) -> None:
    """A chunk that is not there reads as zeros, so the claimed size costs no disk and would cost all of the memory."""
    store = BatchStore(tmp_path)
    path = store.commit(batch)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = "routed_experts/zarr.json"
    # Lines of an indented list in Zarr's JSON.
    claimed = members[header].replace(f"{len(batch.tokens)},".encode(), b"1000000000000,", 1)
    assert claimed != members[header]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (members | {header: claimed}).items():
            archive.writestr(name, data)
    path.write_bytes(sealed_zip(path.read_bytes()))
    with pytest.raises(CorruptBatchError, match=r"content digest differs: routed_experts is"):
        store.read(0, None)
