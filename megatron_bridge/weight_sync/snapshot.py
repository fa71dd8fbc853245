"""Keep a version's tensors in host memory, once for all ranks of a host: one rank writes, its neighbors read.

    keeper      gathered, quantized ─▶ copied into blocks of shared memory ─▶ a line of the log for each tensor
    neighbors   /proc/KEEPER/fd ─────▶ the same pages                     ◀── the log, as it grows

Blocks and log are anonymous files (memfd): other processes of the user open them through /proc while the keeper lives,
they take no room in /dev/shm, and they are gone with the last process. On a GPU every process pins the blocks for its
own copies. Blocks are used again by every version.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge.parallel.rank_sync import RankSync
from megatron_bridge.step.host_weights import PinnedMemory

_POLL_S = 0.001
_LOOK_S = 1.0
"""Time between two looks whether the keeper is still there."""
Address = Sequence[int]
"""The keeper's process, and its descriptors of blocks and log."""


def host_of_process() -> str:
    """Return a name of this host, or of this container if its processes see no others: neighbors have the same."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def shared_snapshot(rank_sync: RankSync, ranks: Sequence[int], *, pinned: bool) -> HostSnapshot:
    """Return the snapshot that this rank shares with those of `ranks` on its host; the first of them keeps it.
    Collective over all ranks of `rank_sync`."""
    hosts, rank = rank_sync.gather(host_of_process), rank_sync.rank
    keeper = next(one for one in ranks if hosts[one] == hosts[rank])
    own = HostSnapshot(pinned=pinned) if keeper == rank else None
    addresses = rank_sync.gather(lambda: None if own is None else own.address)
    return own or HostSnapshot(pinned=pinned, keeper=addresses[keeper])


class HostSnapshot:
    """Named tensors in host memory, in the order of adding. One thread of the keeper adds; any number of threads of the
    keeper and its neighbors read."""

    def __init__(self, *, pinned: bool, keeper: Address | None = None) -> None:
        """Open the snapshot of `keeper`, or keep one here. A GPU copies `pinned` memory at full speed."""
        self._pinned = pinned
        self.is_keeper = keeper is None
        if keeper is None:
            self.address: Address = (os.getpid(), os.memfd_create("weights"), os.memfd_create("weights-log"))
            _, self._blocks, self._log = self.address
        else:
            self.address = keeper
            self._blocks, self._log = (os.open(f"/proc/{keeper[0]}/fd/{one}", os.O_RDWR) for one in keeper[1:])
        self._memory = PinnedMemory(pinned=True, new_block=self._add_block)
        self._mapped: dict[int, Tensor] = {}
        """Blocks by their first byte in the file."""
        self._mapping = threading.Lock()
        self._copies: dict[tuple[str, torch.Size, torch.dtype], tuple[Tensor, bytes]] = {}
        """Memory and line of each tensor that was ever added, by format too: it may change and change back."""
        self._number = 0
        """Number of versions begun: a neighbor may look before the keeper has begun the same one."""
        self._failure: Exception | None = None

    def begin(self) -> None:
        """Begin another version. Nothing may read the last version anymore."""
        self._number += 1
        self._failure = None
        if self.is_keeper:
            os.ftruncate(self._log, 0)
            os.lseek(self._log, 0, os.SEEK_SET)
            os.write(self._log, _line(self._number))

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor; the caller may change it afterwards. Only for the keeper."""
        kind = (name, tensor.shape, tensor.dtype)
        if kind not in self._copies:
            copy = self._memory.empty(tensor.shape, tensor.dtype)
            self._copies[kind] = copy, self._describe(name, copy)
        copy, line = self._copies[kind]
        copy.copy_(tensor.detach())
        os.write(self._log, line)

    def end(self, failure: Exception | None = None) -> None:
        """Mark the version as complete; with a `failure` it is incomplete, and every reader raises the failure. A
        neighbor's failure is raised in its own process."""
        self._failure = failure
        if self.is_keeper:
            os.write(self._log, _line(None if failure is None else str(failure)))

    def close(self) -> None:
        """Close the descriptors; nothing may read anymore."""
        os.close(self._blocks)
        os.close(self._log)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, waiting for those not yet added. Readers must not change them. Raises RuntimeError for a
        failure of the keeper."""
        lines = self._lines()
        while next(lines) != self._number:  # the keeper still has the version before
            time.sleep(_POLL_S)
            lines = self._lines()
        for line in lines:
            if not isinstance(line, list):
                if line is not None:
                    raise self._failure or RuntimeError(line)
                return
            name, dtype, shape, first, size, begin, end = line
            yield name, self._block(first, size)[begin:end].view(getattr(torch, dtype)).view(shape)

    def _lines(self) -> Iterator[object]:
        """Yield the values in the log, and wait for more."""
        offset, rest, looked = 0, b"", time.monotonic()
        while True:
            if self._failure is not None:
                raise self._failure
            text = os.pread(self._log, 1 << 16, offset)
            offset += len(text)
            *lines, rest = (rest + text).split(b"\n")
            yield from map(json.loads, lines)
            if text:
                continue
            time.sleep(_POLL_S)
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                if not Path("/proc/{}/fd/{}".format(*self.address)).exists():
                    raise RuntimeError(f"process {self.address[0]}, which kept the weights of this host, has ended")

    def _add_block(self, size: int) -> Tensor:
        first = os.fstat(self._blocks).st_size
        os.ftruncate(self._blocks, first + size)
        return self._block(first, size)

    def _block(self, first: int, size: int) -> Tensor:
        """Return bytes [size] of the blocks from `first`, mapped once."""
        with self._mapping:
            if first not in self._mapped:
                block = torch.frombuffer(mmap.mmap(self._blocks, size, offset=first), dtype=torch.uint8)
                if self._pinned:
                    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                    torch.cuda.check_error(runtime.cudaHostRegister(block.data_ptr(), size, 0))
                self._mapped[first] = block
            return self._mapped[first]

    def _describe(self, name: str, copy: Tensor) -> bytes:
        for first, block in self._mapped.items():
            begin = copy.data_ptr() - block.data_ptr()
            if 0 <= begin <= len(block) - copy.nbytes:
                dtype = str(copy.dtype).removeprefix("torch.")
                return _line([name, dtype, list(copy.shape), first, len(block), begin, begin + copy.nbytes])
        raise AssertionError("the copy lies in no block")


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
