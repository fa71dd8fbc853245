"""Memory of this process that other processes of the machine can open.

On a GPU they open it by a CUDA IPC handle, on a CPU by the name of a file of shared memory. Not yet run on a GPU.

The memory is shared once, when it is made, and every reader gets the same handle. torch's own way of sharing (a tensor
put into a ForkingPickler) shares it anew for each reader: on a GPU each share wraps the storage once more, and no
wrapper is ever removed.

The driver frees a GPU's memory when the process that made it ends. The kernel does not delete a file of shared memory
then. A guard process deletes it, when the buffer is closed and also when this process dies, whatever the cause.
torch's own guard (torch_shm_manager) would keep the file until every process that opened it has ended, and the engines
go on. Where the guard is killed, too, the next start on the machine deletes the file: its name is noted in the folder
for temporary files of the process that was killed (pipeline.child_process).
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
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
    """Pickles as a call: the process that unpickles it calls the function and gets its result."""

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
            self._noted.touch()
            self._guard = _guard(self.file, self._noted)

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def file(self) -> Path:
        """The file of shared memory; on a CPU only."""
        return SHARED_MEMORY / str(self._handle[1], "ascii").lstrip("/")

    @property
    def _noted(self) -> Path:
        return Path(tempfile.gettempdir()) / self.file.name

    def lend(self, num_bytes: int, readers: int) -> Call:
        """An object that unpickles as the first `num_bytes`, uint8 [num_bytes], in another process of this machine.

        Each of `readers` processes must unpickle it once. They get the memory itself, not a copy: they see what is
        written to it later.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
            return Call(reductions.rebuild_cuda_tensor, *cuda_arguments(self._handle, _uuid(self._device), num_bytes))
        for _ in range(readers):
            self._storage._shared_incref()  # an opener counts itself and takes this one away
        opened = Call(reductions.rebuild_storage_filename, torch.UntypedStorage, *self._handle)
        typed = Call(reductions.rebuild_typed_storage, opened, torch.uint8)
        return Call(reductions.rebuild_tensor, torch.Tensor, typed, (0, (num_bytes,), (1,), False))

    def close(self) -> None:
        """No process can open it any more. A process that has it open keeps the memory."""
        if self._guard is not None:
            self._guard.communicate()


def cuda_arguments(handle: tuple[Any, ...], device_uuid: str, num_bytes: int) -> tuple[Any, ...]:
    """Arguments of torch's `rebuild_cuda_tensor` for what `_share_cuda_` returned.

    `device_uuid`: SGLang finds the device by its UUID, since processes that see different devices number them
    differently.
    """
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
        # torch counts readers down here, to know when memory that its owner dropped may be used again. The owner keeps
        # the memory, so the count does not matter.
        counter,
        counter_offset,
        event,
        False,  # do not wait for the event: it was recorded at sharing, and `lend` has waited for later work
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


def _guard(*files: Path) -> subprocess.Popen[bytes]:
    """Deletes the files when its input ends: this process closes it, or dies."""
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; rm -f -- "$@"', "sh", *map(str, files)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal to this process's group is not for the guard
    )
