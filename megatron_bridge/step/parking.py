"""Move a rank's gradients and optimizer state off the device while engines on the same GPU sample, and back.

    parked    parameters on the device: the next publish and the probe read them
              main weights and moments in host memory, gradients nowhere: each training pass begins with zeros
    back      every tensor as before: storages keep their identity, so Megatron's views of its buffers stay true

The host memory is pinned on a GPU and kept: 12 bytes a parameter in BF16, over the data parallel ranks with the
distributed optimizer. Addresses may change: nothing may have captured them in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_bridge.step.host_weights import PinnedMemory

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner

_LEAST_BYTES = 1 << 10
"""Smaller storages stay: counts of steps."""


class Parking:
    """A place in host memory for one rank's optimizer state."""

    def __init__(self, learner: MegatronLearner) -> None:
        self._learner = learner
        self._memory = PinnedMemory(learner.device.type == "cuda")
        self._parked: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        """Storage, its bytes, and where its contents are; None for gradients."""

    def park(self) -> int:
        """Free gradients and optimizer state on the device; return the bytes freed, 0 if they are parked already."""
        if self._parked:
            return 0
        gradients, state = self._storages()
        self._memory.reuse()
        self._parked = [(storage, storage.nbytes(), self._memory.hold(_bytes(storage))) for storage in state]
        self._parked += [(storage, storage.nbytes(), None) for storage in gradients]
        self._synchronize()  # for these copies, and for those of a save that has just begun
        for storage, _, _ in self._parked:
            storage.resize_(0)
        if self._learner.device.type == "cuda":
            torch.cuda.empty_cache()  # other processes get only what torch does not keep
        return sum(size for _, size, _ in self._parked)

    def unpark(self) -> None:
        """Bring everything back to the device. Gradients are zero."""
        parked, self._parked = self._parked, []
        for storage, size, host in parked:
            storage.resize_(size)
            if host is None:
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(host, non_blocking=True)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._learner.device.type == "cuda":
            torch.cuda.synchronize(self._learner.device)

    def _storages(self) -> tuple[list[torch.UntypedStorage], list[torch.UntypedStorage]]:
        """Return the storages of gradients, and those of main weights and moments, on the device and in a fixed order.
        A storage that a parameter shares stays: without main weights the optimizer holds the parameters themselves."""
        learner = self._learner
        seen = {parameter.untyped_storage().data_ptr() for chunk in learner.model for parameter in chunk.parameters()}

        def new(tensors: list[Any]) -> list[torch.UntypedStorage]:
            found = []
            for tensor in tensors:
                if not isinstance(tensor, Tensor) or tensor.device.type != learner.device.type:
                    continue
                storage = tensor.untyped_storage()
                if storage.nbytes() >= _LEAST_BYTES and storage.resizable() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    found.append(storage)
            return found

        buffers = [buffer for chunk in learner.model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        gradients = new([buffer.grad_data for buffer in buffers])
        state: list[Any] = []
        for part in learner.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state += [parameter, *part.optimizer.state.get(parameter, {}).values()]
        return gradients, new(state)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return uint8 [bytes] of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
