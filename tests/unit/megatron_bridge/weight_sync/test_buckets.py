"""Buckets are what SGLang's `flattened_bucket` reads: bytes one after the other, each tensor at its own alignment."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_bridge.weight_sync.buckets import Bucket, bucket_size, pack

new_buffer = partial(torch.empty, dtype=torch.uint8)
DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)


def unpacked(bucket: Bucket) -> dict[str, Tensor]:
    """As the receiver does it: views at running offsets, which torch refuses where they are not aligned."""
    found, offset = {}, 0
    for spec in bucket.tensors:
        dtype = getattr(torch, spec.dtype)
        size = torch.Size(spec.shape).numel() * dtype.itemsize
        assert offset % dtype.itemsize == 0, spec.name
        found[spec.name] = bucket.data[offset : offset + size].view(dtype).reshape(spec.shape)
        offset += size
    assert offset == len(bucket.data)
    return found


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 200),
)
def test_every_tensor_arrives_once_in_buckets_that_hold_what_they_may(
    kinds: list[tuple[torch.dtype, int, int]], bucket_bytes: int
) -> None:
    sent = {
        f"tensor.{place}": torch.arange(rows * columns).reshape(rows, columns).to(dtype)
        for place, (dtype, rows, columns) in enumerate(kinds)
    }
    found: dict[str, Tensor] = {}
    for bucket in pack(sent.items(), bucket_bytes, new_buffer):
        assert len(bucket.data) <= bucket_bytes or len(bucket.tensors) == 1
        found |= unpacked(bucket)
    assert found.keys() == sent.keys()
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float())


MIB = 1 << 20


@pytest.mark.parametrize(
    ("share", "largest", "expected"),
    [(0, 256, 256), (101, 256, 16), (400, 256, 50), (16_384, 256, 256), (101, 1, 1), (7, 256, 16)],
)
def test_a_share_goes_in_eight_buckets_that_are_neither_too_small_nor_too_large(
    share: int, largest: int, expected: int
) -> None:
    assert bucket_size(share * MIB, largest * MIB) == expected * MIB


def test_tensors_fill_a_bucket_before_the_next_begins() -> None:
    sent = [(str(place), torch.zeros(10)) for place in range(7)]
    assert [len(bucket.tensors) for bucket in pack(sent, 100, new_buffer)] == [2, 2, 2, 1]


def test_memory_that_is_reused_does_not_matter() -> None:
    buffer = torch.zeros(4)

    def stream() -> list[tuple[str, Tensor]]:
        for place in range(3):
            buffer.fill_(place)
            yield str(place), buffer  # type: ignore[misc]

    (bucket,) = pack(stream(), 1 << 10, new_buffer)  # type: ignore[arg-type]
    assert [tensor[0].item() for tensor in unpacked(bucket).values()] == [0, 1, 2]


def test_a_row_is_asked_for_once_the_last_bucket_was_taken() -> None:
    """One row serves all buckets: nothing is written to it before its bucket was sent."""
    row, sizes = torch.empty(100, dtype=torch.uint8), []

    def same_row(num_bytes: int) -> Tensor:
        sizes.append(num_bytes)
        return row[:num_bytes]

    sent = [(str(place), torch.full((10,), float(place))) for place in range(5)]
    for bucket in pack(sent, 80, same_row):
        for name, tensor in unpacked(bucket).items():
            assert tensor[0].item() == int(name)
    assert sizes == [80, 80, 80]
