"""Tensors cut out of blocks. Nothing is pinned here: that takes a GPU's driver."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_bridge.pinned_memory import PinnedMemory


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> PinnedMemory:
    """Blocks of 4 KiB."""

    def new_block(_: PinnedMemory, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(PinnedMemory, "_new_block", new_block)
    return PinnedMemory(pinned=True, block_bytes=4096)


def test_tensors_have_memory_of_their_own(memory: PinnedMemory) -> None:
    kinds = [((3, 5), torch.float32), ((), torch.bfloat16), ((0, 4), torch.float32), ((7,), torch.uint8)] * 3
    made = [memory.empty(shape, dtype) for shape, dtype in kinds]
    for value, tensor in enumerate(made):
        tensor.fill_(value)
    for value, (tensor, (shape, dtype)) in enumerate(zip(made, kinds, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert bool((tensor == value).all())


def test_what_is_large_costs_no_second_of_itself(memory: PinnedMemory) -> None:
    """Seven times 9 KiB would be seven times 16 when each is rounded up."""
    sized = PinnedMemory(pinned=True, block_bytes=65536)
    for _ in range(7):
        sized.empty((9 * 1024,), torch.uint8)
    assert sized.num_bytes == 65536
    memory.empty((5000,), torch.uint8)
    memory.empty((3000,), torch.uint8)  # into what is left of the block of 8 KiB
    assert memory.num_bytes == 8192


def test_without_a_gpu_tensors_are_plain() -> None:
    memory = PinnedMemory(pinned=False)
    assert memory.empty((2, 3), torch.float32).shape == (2, 3)
    assert memory.num_bytes == 0
