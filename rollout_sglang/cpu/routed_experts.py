"""SGLang's record of routed experts (`--enable-return-routed-experts`) on a machine without CUDA.

SGLang keeps the record in host memory that it registers with CUDA. A CPU has nothing to register it with: plain memory
is the same there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_HOST_CACHE = "sglang.srt.state_capturer.base.BaseHostCache.__init__"


def register_hooks() -> None:
    """Give the record an allocator for the device `cpu`, just before its first use. Once a process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_HOST_CACHE, _allow_cpu, HookType.BEFORE)


def _allow_cpu(*_: Any, **__: Any) -> None:
    from sglang.srt.state_capturer.base import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory


def _plain_memory(dims: tuple[int, ...], dtype: torch.dtype, device: str, **_: Any) -> Tensor:
    """SGLang's signature of an allocator; `pin_memory` and the ways to register memory are without meaning here."""
    return torch.zeros(dims, dtype=dtype, device=device)
