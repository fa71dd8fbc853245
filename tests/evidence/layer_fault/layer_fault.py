"""A fault made on purpose: the FP8 rounding error of some layers' inputs grows, in the engine and in the learner's
emulation of it. Never part of the product, which does not know that it is there.

    EVENKEEL_TEST_LAYER_FAULT    FACTOR MODULE… : the engine's names of modules, such as model.layers.0.mlp.down_proj
    EVENKEEL_TEST_LAYER_TRIGGER  a file: the fault is there from the moment at which the file is

x is held as  x + FACTOR (fp8(x) - x)  in these layers while they are quantized. Unquantized they have no such error.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_STACKS = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}


def _fault() -> tuple[float, frozenset[str]]:
    factor, *modules = os.environ["EVENKEEL_TEST_LAYER_FAULT"].split()
    return float(factor), frozenset(modules)


def is_there() -> bool:
    """Whether the fault has begun."""
    return os.path.exists(os.environ["EVENKEEL_TEST_LAYER_TRIGGER"])


def _patch_engine(fp8: Any) -> None:
    """In rollout_sglang.cpu.quantized: know each layer's name, and make its input's rounding worse."""
    factor, modules = _fault()
    register = fp8.register_hooks

    def named(original: Callable[..., Any], config: Any, layer: Any, prefix: str) -> Any:
        layer.fault_name = prefix
        return original(config, layer, prefix)

    def register_hooks() -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        register()
        HookRegistry.register(f"{fp8._MODULE}.Fp8Config.get_quant_method", named, HookType.AROUND)

    def apply(_: Any, method: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        rollout_format = fp8.RolloutFormat.FP8_BLOCK if method.block_quant else fp8.RolloutFormat.FP8_TENSOR
        rounded = fp8.fake_quantize(x, rollout_format, per_token=True)
        if getattr(layer, "fault_name", "") in modules and is_there():
            rounded = x + factor * (rounded - x)
        return fp8.F.linear(rounded, layer.dequantized_weight, bias)

    fp8.register_hooks, fp8._apply = register_hooks, apply


def _patch_learner(emulation: Any) -> None:
    """In megatron_bridge.step.fp8_emulation: the same."""
    factor, modules = _fault()
    begin, quantize_input = emulation.Fp8Emulation.__init__, emulation.quantize_input

    def named(self: Any, *arguments: Any) -> None:
        begin(self, *arguments)
        for linear in self._linears:
            parent, _, part = linear.slices[0].name.removesuffix(".weight").rpartition(".")
            linear.module.fault_name = f"{parent}.{_STACKS.get(part, part)}"

    def worse(rollout_format: Any, linear: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        rounded, *rest = quantize_input(rollout_format, linear, inputs)
        if linear.fault_name in modules and is_there():
            rounded = inputs[0] + factor * (rounded - inputs[0])
        return (rounded, *rest)

    emulation.Fp8Emulation.__init__, emulation.quantize_input = named, worse


_PATCHES = {"rollout_sglang.cpu.quantized": _patch_engine, "megatron_bridge.step.fp8_emulation": _patch_learner}


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the next finders find a module, and patches it once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _PATCHES[fullname](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Patch both modules when they are imported."""
    sys.meta_path.insert(0, _Finder())
