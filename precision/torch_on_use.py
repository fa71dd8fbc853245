"""Provide `torch` and `Tensor` to files that must be importable where torch is not installed, or not wanted yet.

    from precision.torch_on_use import Tensor, torch

An objective's settings are read by a recipe, its mathematics by the learner, and both stand in one file. Reading a
recipe must not take the seconds that torch needs to load, so this `torch` loads it at the first access to an attribute.
A type checker sees the real module. Two things do not work: a decorator such as `@torch.no_grad()`, which accesses it
while the file is read (use the `with` statement), and `isinstance(x, Tensor)` (use `torch.Tensor`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "torch"]

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _TorchOnUse:
        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("torch"), name)

    torch = _TorchOnUse()
    Tensor = "torch.Tensor"
