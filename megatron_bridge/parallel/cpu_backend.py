"""Let Megatron-Core run on a machine without CUDA.

Megatron-Core allocates with `device="cuda"`, asks `torch.cuda` for devices, streams and RNG states, and compares
`Tensor.type()` with `torch.cuda.FloatTensor`. `install` replaces the global name `torch` in every Megatron module by a
copy of torch's namespace, in which the allocating functions read "cuda" as "cpu" and `cuda` is answered by the CPU.
Nothing stands between an operator and its kernel, so the hot path costs nothing. torch itself, as other packages see
it, is unchanged but for `Tensor.cuda` (returns the tensor) and `Tensor.type` (returns the CUDA type's name).

Process-global. Call `install()` once, before a model is built; it does nothing if CUDA is available.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_ALLOCATORS = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")

# Functions of Megatron-Core import these: they must be loaded before their name `torch` is replaced.
_LATE_IMPORTS = (
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.transformer.utils",
)


def install() -> bool:
    """Redirect Megatron-Core to the CPU. Returns whether this process now runs on the CPU (False with CUDA)."""
    if torch.cuda.is_available():
        return False
    module = sys.modules.get("megatron.core.parallel_state")
    if module is not None and getattr(module, "torch", torch) is not torch:  # installed already
        return True
    for name in _LATE_IMPORTS:
        importlib.import_module(name)
    stand_in = _torch_stand_in()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = stand_in  # type: ignore[attr-defined]
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]

    # Megatron's RNG tracker swaps the default generator's state; on the CPU that is torch's own generator.
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    # Megatron-Core converts its all-to-all's sizes to numpy arrays only from a GPU; torch takes no tensors for them.
    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host
    return True


def _on_cpu(allocate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(allocate)
    def allocate_on_cpu(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # pinned memory serves only GPU copies
        return allocate(*args, **kwargs)

    return allocate_on_cpu


def _torch_stand_in() -> types.ModuleType:
    stand_in = types.ModuleType("torch", torch.__doc__)
    stand_in.__dict__.update(torch.__dict__)
    for name in _ALLOCATORS:
        setattr(stand_in, name, _on_cpu(getattr(torch, name)))
    # Submodules that are imported later must be found as well.
    stand_in.__getattr__ = lambda name: getattr(torch, name)  # type: ignore[method-assign]
    cuda, stream = types.ModuleType("torch.cuda", torch.cuda.__doc__), _Stream()
    cuda.__dict__.update(torch.cuda.__dict__)
    cuda.__dict__.update(
        current_device=lambda: "cpu",
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        stream=lambda _: contextlib.nullcontext(),
        current_stream=lambda *_: stream,
        default_stream=lambda *_: stream,
        Stream=_Stream,
        Event=_Event,
        manual_seed=torch.manual_seed,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )
    stand_in.cuda = cuda  # type: ignore[attr-defined]
    return stand_in


class _Event:
    """An event that has always happened, because the CPU runs in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.record = self.wait = self.synchronize = lambda *_: None
        self.query = lambda: True


class _Stream:
    """The CPU's only stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.wait_stream = self.wait_event = self.synchronize = lambda *_: None
        self.record_event = lambda event=None: event or _Event()
