"""Faults of an engine, made on purpose inside a real SGLang server of this machine. Never part of the product.

A test names one in FAULT_VARIABLE before it starts an engine by tests.support.engine_forks; the server that is forked
then installs it, most by SGLang's own hook registry:

    scale MODULE FACTOR    the matrix product of one of the engine's modules is FACTOR times what it should be; its
                           parameters, and so their checksums, are right
    weights_only           activations are not quantized
    bf16_head              the LM head is held in bfloat16
    decode_attention       while decoding, values that were read from the KV cache are rounded to e4m3
    temperature FACTOR     sampling divides by FACTOR times the temperature that was asked for
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FAULT_VARIABLE = "EVENKEEL_TEST_ENGINE_FAULT"


@contextmanager
def engine_fault(fault: str) -> Iterator[None]:
    """Engines that are forked meanwhile have the fault."""
    os.environ[FAULT_VARIABLE] = fault
    try:
        yield
    finally:
        del os.environ[FAULT_VARIABLE]


def install_fault() -> None:
    """In a forked server, before it serves."""
    name, *arguments = os.environ.get(FAULT_VARIABLE, "").split() or [""]
    if name:
        _FAULTS[name](*arguments)


def _scale(module: str, factor: str) -> None:
    def change(layer: Any) -> None:
        layer.dequantized_weight = layer.dequantized_weight * float(factor)

    _after_loading(module, change)


def _bf16_head() -> None:
    import torch

    def change(layer: Any) -> None:
        layer.weight.data = layer.weight.data.to(torch.bfloat16).to(layer.weight.dtype)

    _after_loading("lm_head", change)


def _after_loading(module: str, change: Callable[[Any], None]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def hook(_: Any, model: Any, *__: Any) -> None:
        change(dict(model.named_modules())[module])

    HookRegistry.register("sglang.srt.model_loader.loader.DefaultModelLoader.postprocess_weights", hook, HookType.AFTER)


def _weights_only() -> None:
    from rollout_sglang.cpu import quantized

    right = quantized.fake_quantize
    quantized.fake_quantize = lambda values, name, per_token=False: values if per_token else right(values, name)


def _decode_attention() -> None:
    from precision.formats.formats import fake_quantize
    from precision.formats.rollout_format import RolloutFormat
    from rollout_sglang.cpu import forward

    right = forward.attention

    def wrong(query: Any, keys: Any, values: Any, mask: Any, scale: Any) -> Any:
        one_new_token = query.shape[1] == 1
        return right(
            query, keys, fake_quantize(values, RolloutFormat.FP8_TENSOR) if one_new_token else values, mask, scale
        )

    forward.attention = wrong


def _temperature(factor: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def hook(info: Any, *_: Any) -> Any:
        info.temperatures.mul_(float(factor))
        return info

    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", hook, HookType.AFTER
    )


_FAULTS: dict[str, Callable[..., None]] = {
    "scale": _scale,
    "bf16_head": _bf16_head,
    "weights_only": _weights_only,
    "decode_attention": _decode_attention,
    "temperature": _temperature,
}
