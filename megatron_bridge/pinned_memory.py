"""Host memory from which a GPU copies at full speed, for tensors that stay.

torch rounds each pinned allocation up to a power of two (CachingHostAllocator), up to twice of what was asked, and
gives none back. So tensors are cut out of large blocks, whose rounding costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 30
_ALIGNED = 512
"""Bytes at whose multiples tensors begin, as torch's own allocators do."""


@dataclass
class PinnedMemory:
    """Hands out tensors; their memory is one with this object's. `pinned` false, where there is no GPU: plain ones."""

    pinned: bool
    block_bytes: int = BLOCK_BYTES
    _blocks: list[Tensor] = field(default_factory=list)
    _used: list[int] = field(default_factory=list)
    """Of each block, from its beginning."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of undefined values."""
        if not self.pinned:
            return torch.empty(tuple(shape), dtype=dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        block = self._block_for(num_bytes)
        begin = self._used[block]
        self._used[block] = -(-(begin + num_bytes) // _ALIGNED) * _ALIGNED
        return self._blocks[block][begin : begin + num_bytes].view(dtype).view(tuple(shape))

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return sum(map(len, self._blocks))

    def _block_for(self, num_bytes: int) -> int:
        """The first with so much left; a new one where none has."""
        for index, (block, used) in enumerate(zip(self._blocks, self._used, strict=True)):
            if len(block) - used >= num_bytes:
                return index
        size = max(self.block_bytes, 1 << (num_bytes - 1).bit_length())
        self._blocks.append(self._new_block(size))
        self._used.append(0)
        return len(self._blocks) - 1

    def _new_block(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
