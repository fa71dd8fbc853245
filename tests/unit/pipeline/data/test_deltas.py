"""What changed in a run of numbers, encoded and applied again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.data import deltas
from pipeline.data.deltas import Places, apply, changed_runs

Bytes = NDArray[np.uint8]


def applied(old: Bytes, new: Bytes, width: int) -> Bytes:
    target = old.copy()
    for run, payload, _ in changed_runs(old, new, width):
        apply(target, width, run, payload)
    return target


def pair(count: int, width: int, share: float, seed: int) -> tuple[Bytes, Bytes]:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, count * width, dtype=np.uint8)
    new = old.copy()
    chosen = rng.random(count) < share
    new.view(f"<u{width}")[chosen] ^= 1
    return old, new


@given(
    count=st.integers(0, 3000),
    width=st.sampled_from([1, 2, 4, 8]),
    share=st.sampled_from([0.0, 0.0005, 0.01, 0.2, 0.6, 1.0]),
    seed=st.integers(0, 2**32),
    run_numbers=st.sampled_from([7, 300, 1 << 24]),
)
@settings(max_examples=80, deadline=None)
def test_applied_once_or_twice_the_new_bytes_are_there(
    count: int, width: int, share: float, seed: int, run_numbers: int
) -> None:
    old, new = pair(count, width, share, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "RUN_NUMBERS", run_numbers)
        runs = changed_runs(old, new, width)
    target = old.copy()
    for _ in range(2):
        for run, payload, _ in runs:
            apply(target, width, run, payload)
        np.testing.assert_array_equal(target, new)
    assert sum(changed for *_, changed in runs) == np.count_nonzero(old.view(f"<u{width}") != new.view(f"<u{width}"))


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 257, 511, 512, 65_535, 65_536, 65_537, 131_072, 200_000])
@pytest.mark.parametrize("near", [0, 100])
def test_gaps_of_every_length(gap: int, near: int) -> None:
    """With many places near one another, gaps have one byte and the long one is bridged; alone, they have two."""
    old = np.zeros(gap + near + 5, np.uint8)
    new = old.copy()
    new[:near] = 7
    new[near + gap] = 9
    np.testing.assert_array_equal(applied(old, new, 1), new)


def test_numbers_are_compared_as_bits() -> None:
    old = np.array([0.0, np.nan, 1.0, np.nan], np.float32).view(np.uint8)
    new = np.array([-0.0, np.nan, 1.0, 2.0], np.float32).view(np.uint8)
    ((_, _, changed),) = changed_runs(old, new, 4)
    assert changed == 2
    np.testing.assert_array_equal(applied(old, new, 4), new)


def test_nothing_changed_is_nothing() -> None:
    old = np.arange(16, dtype=np.uint8)
    assert changed_runs(old, old.copy(), 2) == []
    assert changed_runs(old[:0], old[:0], 2) == []


def test_sparse_changes_take_little_more_than_they_must() -> None:
    """One number in a thousand: log2(1000) + 1.44 bits say where, and one byte what, 2.4 bytes in all."""
    old, new = pair(1 << 20, 1, 0.001, 0)
    ((_, payload, changed),) = changed_runs(old, new, 1)
    assert len(payload) < 3.0 * changed


def test_dense_changes_take_no_more_than_all_bytes() -> None:
    old = np.random.default_rng(0).integers(0, 256, 1 << 18, dtype=np.uint8)
    new = np.random.default_rng(1).integers(0, 256, 1 << 18, dtype=np.uint8)
    ((run, payload, _),) = changed_runs(old, new, 1)
    assert run.gap_bytes == 0
    assert len(payload) < 1.001 * len(new) + 100


def test_a_payload_that_is_none_is_refused_and_writes_nothing() -> None:
    old, new = pair(1000, 2, 0.1, 0)
    ((run, payload, _),) = changed_runs(old, new, 2)
    broken = [
        (run, payload[:-1]),
        (run, b""),
        (run._replace(places=run.places + 1), payload),
        (run._replace(places=run.places - 1), payload),
        (run._replace(length=2000), payload),
        (run._replace(first=1), payload),
        (run._replace(gap_bytes=3), payload),
        (Places(0, 1000, run.places, 0), payload),
    ]
    for wrong, data in broken:
        target = old.copy()
        with pytest.raises(ValueError, match=r"."):
            apply(target, 2, wrong, data)
        np.testing.assert_array_equal(target, old)


def test_a_place_beyond_the_run_is_refused() -> None:
    old = np.zeros(100, np.uint8)
    new = old.copy()
    new[99] = 1
    ((run, payload, _),) = changed_runs(old, new, 1)
    with pytest.raises(ValueError, match="its last place is 99, expected one below 50"):
        apply(old, 1, run._replace(length=50), payload)
