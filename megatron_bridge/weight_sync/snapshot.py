"""One version of a rank's share of the weights, copied into this machine's memory: what is trained next changes nothing
of it.

    learner's thread   gather ─▶ quantize ─▶ add … add ─▶ end
    other threads                             └──────┴──▶ every tensor, from the first one, as it comes

The memory is kept for the next version: fresh memory costs more than the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_bridge.pinned_memory import PinnedMemory


class HostSnapshot:
    """Named tensors, in the order in which they were added. One thread adds, any number read."""

    def __init__(self, *, pinned: bool) -> None:
        """`pinned` memory is copied to and from a GPU at full speed."""
        self._pinned = PinnedMemory(pinned)
        self._memory: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}
        """A tensor may change its format and change it back."""
        self._tensors: list[tuple[str, Tensor]] = []
        self._complete = True
        self._failure: Exception | None = None
        self._changed = threading.Condition()

    def begin(self) -> None:
        """Begin another version. Nothing may read the last one any more."""
        with self._changed:
            self._tensors, self._complete, self._failure = [], False, None

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor; the caller may then change it."""
        kind = (name, tensor.shape, tensor.dtype)
        if (copy := self._memory.get(kind)) is None:
            copy = self._memory[kind] = self._pinned.empty(tensor.shape, tensor.dtype)
        copy.copy_(tensor.detach())
        with self._changed:
            self._tensors.append((name, copy))
            self._changed.notify_all()

    def end(self, failure: Exception | None = None) -> None:
        """No more tensors come; with a failure, not all have come, and every reader raises it."""
        with self._changed:
            self._complete, self._failure = True, failure
            self._changed.notify_all()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, to the end; those that have not come are waited for. Do not change them."""
        position = 0
        while True:
            with self._changed:
                while len(self._tensors) == position and not self._complete:
                    self._changed.wait()
                if self._failure is not None:
                    raise self._failure
                if position == len(self._tensors):
                    return
                item = self._tensors[position]
            position += 1
            yield item

    def wait(self) -> None:
        """Returns once it is complete. Raises what ended it."""
        for _ in self:
            pass
