"""A device that counts: its tensors are the CPU's; its kernels, copies and waits are recorded as a GPU would have them.

    learner ──torch──▶ dispatcher ──▶ count, unwrap, run on the CPU, wrap ──▶ tensors of the counted device

It is torch's PrivateUse1 device, made of Python, so `tensor.device` is real to all code, and an operator over tensors
of host and device is refused as on a GPU. The host waits where torch's CUDA kernels would have it wait: when it reads a
number, when a result's shape depends on values, for a copy to the host, and for a copy from memory that is not pinned.
One kernel stands for attention and one for each pass over the logits, as Triton's are.

Only in a process of its own: autograd makes its threads, one a device, at a process's first backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from megatron_bridge import learner as learner_module
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.model import logprobs
from megatron_bridge.parallel import cpu_backend

DEVICE = torch.device("privateuseone", 0)  # named "counted" once `counting_learner` runs
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "bincount")
_NO_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach_")


@dataclass
class Counts:
    kernels: Counter[str] = field(default_factory=Counter)
    """By operator; views and allocations are none."""
    copies: Counter[str] = field(default_factory=Counter)
    """Between host and device: "pinned" and "pageable" to the device, "to host"."""
    waits: Counter[str] = field(default_factory=Counter)
    """What made the host wait for the device."""


@dataclass
class _Now:
    counts: Counts = field(default_factory=Counts)
    silent: int = 0
    """Above 0 inside an operator that stands for one kernel."""
    pinned: list[Tensor] = field(default_factory=list)


_now = _Now()


class OnDevice(Tensor):
    """A tensor of the counted device; `inner` is its values on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls: Any, inner: Tensor) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner.detach()
        return made

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.inner = value.inner

    def tolist(self) -> Any:  # torch refuses it for a subclass
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operator, args, kwargs or {}, None)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operator, args, kwargs or {}, None if _now.silent else _now.counts)


def _run(operator: Any, args: Any, kwargs: dict[str, Any], counts: Counts | None) -> Any:
    space, name = operator._schema.name.split("::")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    wanted = kwargs.get("device")
    held = any(isinstance(tensor, OnDevice) for tensor in tensors)
    lands = held if wanted is None else torch.device(wanted).type == DEVICE.type
    if not held and not lands:
        return operator(*args, **kwargs)
    if name == "_fused_sdp_choice":
        return 0
    if counts is not None:
        _count(counts, operator, name, args, kwargs, lands)
    on_cpu = dict(kwargs) if wanted is None else kwargs | {"device": torch.device("cpu")}
    out = operator(*tree_map(_inner, args), **tree_map(_inner, on_cpu))
    if space == "c10d":  # works in place, and returns its tensors and a handle
        return (args[0], out[1]) if isinstance(out, tuple) else out
    if not lands:
        return out
    return return_and_correct_aliasing(operator, args, kwargs, tree_map(_outer, out))


def _count(counts: Counts, operator: Any, name: str, args: Any, kwargs: dict[str, Any], lands: bool) -> None:
    if name in ("_to_copy", "copy_"):
        source = args[1] if name == "copy_" else args[0]
        lands = isinstance(args[0], OnDevice) if name == "copy_" else lands
        if lands is not isinstance(source, OnDevice):
            _count_copy(counts, source, lands, bool(kwargs.get("non_blocking") or args[2:]))
            return
    elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        for index in args[1]:
            if index is not None and not isinstance(index, OnDevice):
                _count_copy(counts, index, True, False)
            if index is not None and index.dtype is torch.bool:
                counts.waits[f"{name} by bool"] += 1
    elif any(isinstance(leaf, Tensor) and not isinstance(leaf, OnDevice) and leaf.dim() for leaf in tree_leaves(args)):
        raise RuntimeError(f"{name} over tensors of host and device, which a GPU refuses")
    if name in _WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        counts.waits[name] += 1
    is_view = any(each.alias_info and not each.alias_info.is_write for each in operator._schema.returns)
    if not is_view and name not in _NO_KERNEL:
        counts.kernels[name] += 1


def _count_copy(counts: Counts, source: Tensor, lands: bool, non_blocking: bool) -> None:
    begins = source.untyped_storage().data_ptr() if lands else None
    pinned = lands and any(begins == each.untyped_storage().data_ptr() for each in _now.pinned)
    counts.copies[("pinned" if pinned else "pageable") if lands else "to host"] += 1
    if not (pinned and non_blocking):
        counts.waits["copy to device" if lands else "copy to host"] += 1


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnDevice) else value


def _outer(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, Tensor) and not isinstance(value, OnDevice) else value


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what is done inside the block."""
    before, _now.counts = _now.counts, Counts()
    try:
        yield _now.counts
    finally:
        _now.counts = before


def _one_kernel(name: str, action: Callable[..., Any]) -> Callable[..., Any]:
    def counted_once(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, OnDevice) for leaf in tree_leaves(args)) and not _now.silent:
            _now.counts.kernels[name] += 1
        _now.silent += 1
        try:
            return action(*args, **kwargs)
        finally:
            _now.silent -= 1

    return counted_once


class _Attention(torch.autograd.Function):
    """torch's attention as one kernel forward and one backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, named: dict[str, Any]) -> Tensor:
        leaves = [tensor.inner.detach().requires_grad_() for tensor in (query, key, value)]
        with torch.enable_grad():
            out = _plain_attention(*leaves, **named)
        ctx.leaves, ctx.out = leaves, out
        _now.counts.kernels["attention"] += 1
        return OnDevice(out.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        _now.counts.kernels["attention_backward"] += 1
        found = torch.autograd.grad(ctx.out, ctx.leaves, grads[0].inner)
        return (*map(OnDevice, found), None)


_plain_attention = torch.nn.functional.scaled_dot_product_attention


def _attention(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
    if not isinstance(query, OnDevice):
        return _plain_attention(query, key, value, **named)
    return _Attention.apply(query, key, value, named)  # type: ignore[no-any-return, no-untyped-call]


@contextmanager
def counting_learner(*arguments: Any, **named: Any) -> Iterator[MegatronLearner]:
    """`MegatronLearner.create` on the counted device, in a process that has not gone backward yet."""
    _setup_privateuseone_for_python_backend("counted")
    cpu_backend.install()
    stand_in = parallel_state.torch  # Megatron's torch, in which "cuda" is the CPU
    build, plain_type = learner_module.build_chunks, Tensor.type

    def build_on_device(*arguments: Any, **named: Any) -> list[Any]:
        chunks = build(*arguments, **named)
        moved = dict[int, Any]()
        for module in (module for chunk in chunks for module in chunk.modules()):
            for name, held in module._parameters.items():
                if held is not None:
                    if id(held) not in moved:
                        moved[id(held)] = torch.nn.Parameter(OnDevice(held.data))
                        moved[id(held)].__dict__.update(held.__dict__)
                    module._parameters[name] = moved[id(held)]
        return chunks

    def pin_memory(tensor: Tensor) -> Tensor:
        _now.pinned.append(tensor.clone())
        return _now.pinned[-1]

    ours = SimpleNamespace(**vars(torch))
    ours.cuda = SimpleNamespace(is_available=lambda: True, current_device=lambda: 0)
    ours.device = lambda *_: DEVICE
    ours.tensor, ours.as_tensor = _allocator(torch.tensor), _allocator(torch.as_tensor)
    with ExitStack() as stack:
        for target, name, value in (
            (learner_module, "build_chunks", build_on_device),
            (learner_module, "torch", ours),
            (torch.nn.functional, "scaled_dot_product_attention", _attention),
            (logprobs, "statistics", _one_kernel("logprobs", logprobs.statistics)),
            (logprobs, "write_gradient", _one_kernel("logprobs_gradient", logprobs.write_gradient)),
            (Tensor, "pin_memory", pin_memory),
            (Tensor, "type", lambda tensor, *arguments, **named: plain_type(_inner(tensor), *arguments, **named)),
            (stand_in.cuda, "current_device", lambda: DEVICE),
        ):
            stack.enter_context(patch.object(target, name, value))
        for name in cpu_backend._ALLOCATORS:
            stack.enter_context(patch.object(stand_in, name, _allocator(getattr(torch, name))))
        stack.enter_context(_Mode())
        yield MegatronLearner.create(*arguments, **named)


def _allocator(allocate: Callable[..., Any]) -> Callable[..., Any]:
    def on_device(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "cpu":
            kwargs["device"] = DEVICE
        kwargs.pop("pin_memory", None)
        if allocate in (torch.tensor, torch.as_tensor):  # which no dispatch mode sees
            device = kwargs.pop("device", None)
            return allocate(*args, **kwargs).to(device)
        return allocate(*args, **kwargs)

    return on_device
