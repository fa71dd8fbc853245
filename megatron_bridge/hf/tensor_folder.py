"""Reads the tensors of a model folder by slices, so that no whole tensor and no whole file need be in memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_bridge.hf.headers import DTYPES, FLOATS, tensor_headers
from megatron_bridge.hf.tensor_specs import num_bytes
from pipeline.errors import ModelError
from pipeline.ports.weights import TensorSpec

PIECE_BYTES = 4 << 20
"""What is read at once, at most (a single row may be larger): a few times this fits into a CPU's cache."""
REOPEN_BYTES = 32 << 20
"""The library maps files into memory, where each page that was read counts as resident until the file is closed. So a
file is opened anew after so many bytes. To open one for every slice would parse its header as often."""


class TensorFolder:
    """The tensors of a model folder. Raises ModelError for a damaged folder. Not safe for several threads."""

    def __init__(self, folder: Path) -> None:
        self._headers = tensor_headers(folder)
        for name, header in self._headers.items():
            if header.dtype not in DTYPES:
                raise ModelError(f"{header.file}: {name} is {header.dtype}, expected one of {', '.join(DTYPES)}")
        self.specs = {
            name: TensorSpec(name=name, dtype=DTYPES[header.dtype], shape=header.shape)
            for name, header in self._headers.items()
        }
        """Every tensor by name: the files by name, the tensors of a file by theirs."""
        self._path: Path | None = None
        self._file: Any = None
        self._num_read = 0

    def slice(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Part of a tensor of at least one dimension. It may share memory with the file: do not write to it."""
        file = self._open(self._headers[name].file)
        tensor: Tensor = file.get_slice(name)[index]
        return self._read(name, tensor)

    def whole(self, name: str) -> Tensor:
        """A tensor as it was stored. It may share memory with the file: do not write to it."""
        tensor: Tensor = self._open(self._headers[name].file).get_tensor(name)
        return self._read(name, tensor)

    def _read(self, name: str, tensor: Tensor) -> Tensor:
        """The values that were read. Raises ModelError where one of them is not finite: no run can begin with it."""
        self._num_read += tensor.nbytes
        if self._headers[name].dtype in FLOATS and tensor.numel():
            ends = torch.stack(torch.aminmax(tensor.detach()))  # one pass, in which NaN wins
            if not ends.isfinite().all():
                raise ModelError(
                    f"{self._headers[name].file}: {name} holds values that are not finite (nan or inf); fetch the "
                    "model again, or take an earlier checkpoint of it"
                )
        return tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by name, in the order of `specs`."""
        return ((name, self.whole(name)) for name in self.specs)

    def pieces(self, name: str, multiple: int = 1, piece_bytes: int = PIECE_BYTES) -> Iterator[Tensor]:
        """A tensor in runs of whole rows: a multiple of `multiple` (but for the last), about `piece_bytes` each."""
        spec = self.specs[name]
        if not math.prod(spec.shape) or not spec.shape:
            yield self.whole(name)
            return
        num_rows = spec.shape[0]
        step = max(1, piece_bytes * num_rows // num_bytes(spec) // multiple) * multiple
        for first in range(0, num_rows, step):
            yield self.slice(name, (slice(first, min(first + step, num_rows)),))

    def digest(self, name: str) -> str:
        """sha256 of a tensor's bytes."""
        sha = hashlib.sha256()
        for piece in self.pieces(name):
            sha.update(piece.flatten().view(torch.uint8).numpy().data)
        return sha.hexdigest()

    def _open(self, path: Path) -> Any:
        if path != self._path or self._num_read >= REOPEN_BYTES:
            self._file = None
            try:
                self._file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} changed while it was read ({error}); fetch the model again") from error
            self._path, self._num_read = path, 0
        return self._file
