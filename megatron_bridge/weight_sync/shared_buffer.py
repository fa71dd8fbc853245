"""Bytes of this process that other processes of the machine can open: by a CUDA IPC handle, or on a CPU by the name of
a file of shared memory. Not yet run on a GPU.

The memory is shared once, when it is made, and the same handle is given out ever after. torch's own way of sharing (a
tensor put into a ForkingPickler) would share it anew each time: on a GPU each new share wraps the storage once more and
none is ever unwrapped.

A GPU's memory goes with the process that made it. A file of shared memory does not: a guard process deletes its name,
when the row is closed as well as when this process dies, whatever it dies of. (torch's own guard, torch_shm_manager,
waits until every process that ever opened the file is gone: the engines, that is.)
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch.multiprocessing import reductions
from torch.storage import TypedStorage

from pipeline.errors import FatalError

SHARED_MEMORY = Path("/dev/shm")
"""Where torch's shared memory lies; a container gives it 64 MiB unless it is told otherwise."""


class Call:
    """Pickles as a call: whoever unpickles it gets what the function returns there."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function = function
        self.arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.arguments


class SharedBuffer:
    """uint8 [num_bytes] on `device`, to be closed by its owner."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises FatalError when shared memory has no room: writing to it would end the process."""
        self._device = device
        self._guard: subprocess.Popen[bytes] | None = None
        if device.type == "cpu":
            _require_room(num_bytes)
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._storage = cast(Any, self.bytes.untyped_storage())  # the methods that share are not annotated
        self._handle: tuple[Any, ...]
        if device.type == "cuda":
            self._handle = self._storage._share_cuda_()
        else:
            self._handle = self._storage._share_filename_cpu_()
            self._storage._shared_incref()  # so that torch leaves deleting to the guard
            self._guard = _guard(self.file)

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def file(self) -> Path:
        """Of a CPU's memory."""
        return SHARED_MEMORY / str(self._handle[1], "ascii").lstrip("/")

    def lend(self, num_bytes: int, readers: int) -> Call:
        """What opens the first `num_bytes` as they are now, as a tensor; to be unpickled once by each of `readers`
        processes. They hold the memory itself: what is written later, they see."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
            return Call(reductions.rebuild_cuda_tensor, *cuda_arguments(self._handle, _uuid(self._device), num_bytes))
        for _ in range(readers):
            self._storage._shared_incref()  # an opener counts itself and takes this one away
        opened = Call(reductions.rebuild_storage_filename, torch.UntypedStorage, *self._handle)
        typed = Call(reductions.rebuild_typed_storage, opened, torch.uint8)
        return Call(reductions.rebuild_tensor, torch.Tensor, typed, (0, (num_bytes,), (1,), False))

    def close(self) -> None:
        """Nobody can open it any more; who has it open keeps it."""
        if self._guard is not None:
            self._guard.communicate()


def cuda_arguments(handle: tuple[Any, ...], device_uuid: str, num_bytes: int) -> tuple[Any, ...]:
    """Of torch's `rebuild_cuda_tensor`, for what `_share_cuda_` returned. `device_uuid`: SGLang finds the device by its
    UUID, since indices differ where processes see different devices."""
    _, memory, storage_bytes, offset_bytes, counter, counter_offset, event, _ = handle
    return (
        torch.Tensor,
        (num_bytes,),
        (1,),
        0,
        TypedStorage,
        torch.uint8,
        device_uuid,
        memory,
        storage_bytes,
        offset_bytes,
        False,
        # torch counts readers down here, to know when memory that its owner dropped may be used again. It is counted
        # up once only, so this count says nothing: the owner keeps the memory.
        counter,
        counter_offset,
        event,
        False,  # no waiting for the event: it is of the time of sharing, and `lend` has waited for what came after
    )


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _require_room(num_bytes: int) -> None:
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < num_bytes:
        raise FatalError(
            f"{SHARED_MEMORY} has {free >> 20} MiB free, {-(-num_bytes >> 20)} MiB are needed to hand weights over; "
            "lower weights.bucket_mib, or give the container more (--shm-size)"
        )


def _guard(file: Path) -> subprocess.Popen[bytes]:
    """Deletes the file when its input ends: this process closes it, or dies."""
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; rm -f -- "$0"', str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal to this process's group is not for the guard
    )
