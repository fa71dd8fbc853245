"""Emulate quantized linear layers of SGLang on a CPU, through SGLang's own hook registry.

SGLang's FP8 path asserts AMX or CUDA kernels. The emulation computes the same: e4m3 weights times e4m3 activations,
accumulated in the activation's dtype. It is exact in the formats and saves neither time nor memory.

    fp8_tensor  `--quantization fp8` on a full-precision checkpoint: one scale for each matrix SGLang multiplies by
                (q, k and v are one matrix, as are gate and up), one activation scale a token.
    fp8_block   a checkpoint stored as e4m3 with `weight_scale_inv` for each 128×128 block, one activation scale a
                token and 128 channels.
    stored      a checkpoint stored as e4m3 with one `weight_scale` for each matrix of the checkpoint; a stack of
                them keeps a scale for each part, as SGLang's CUTLASS path does. One activation scale a token.

SGLang calls `process_weights_after_loading` after the first load and after every update of the weights: only then is
the weight dequantized. The parameters that SGLang's weight loaders fill stay unchanged.

Formats that no GPU path serves are emulated too: emulated_fp6, emulated_fp4, emulated_nvfp4 and emulated_mxfp4
(precision.formats.rollout_format). The learner sends rounded weights in the engine's dtype, so checksums match; the
engine rounds the input of each linear layer (emulated_layers). The config.json of the policy names the quant_method
"evenkeel_emulated", which is added to SGLang's table here. An engine without this module refuses the folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision.formats.formats import dequantize_block, fake_quantize
from precision.formats.rollout_format import BLOCK, EMULATED_METHOD, RolloutFormat

_MODULE = "sglang.srt.layers.quantization.fp8"
_METHOD = f"{_MODULE}.Fp8LinearMethod"
_VERIFY = "sglang.srt.configs.model_config.ModelConfig._verify_quantization"


def register_hooks() -> None:
    """Replace the two methods of SGLang's FP8 linear layer that need kernels, and add the emulated method to SGLang's
    table before SGLang checks a folder. Call once per process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_METHOD}.process_weights_after_loading", _remember_dequantized, HookType.AROUND)
    HookRegistry.register(f"{_METHOD}.apply", _apply, HookType.AROUND)
    # Kernels accept only 16-bit activations; the emulation is most exact in 32.
    dtypes = f"{_MODULE}.Fp8Config.get_supported_act_dtypes"
    HookRegistry.register(dtypes, lambda supported, *_: [*supported, torch.float32], HookType.AFTER)
    HookRegistry.register(_VERIFY, _add_method, HookType.BEFORE)


def _remember_dequantized(_: Callable[..., None], method: Any, layer: nn.Module) -> None:
    """Store the weight [out, in] on `layer` as the matrix product uses it, in the model's dtype."""
    layer.dequantized_weight = dequantized(method, layer)


@torch.no_grad()
def dequantized(method: Any, layer: Any) -> Tensor:
    """Return the weight of an FP8 layer after rounding to e4m3, [out, in], in the model's dtype. Raises
    NotImplementedError for blocks other than 128 by 128, and for stored activation scales."""
    weight: Tensor = layer.weight.data
    if method.block_quant:
        if tuple(method.weight_block_size) != BLOCK:
            raise NotImplementedError(
                f"the CPU engine rounds in blocks of {BLOCK}, this checkpoint has {tuple(method.weight_block_size)}; "
                "serve one made by `evenkeel convert hf-to-fp8`, or use a GPU"
            )
        return dequantize_block(weight, layer.weight_scale_inv.data).to(layer.orig_dtype)
    if method.is_checkpoint_fp8_serialized:
        if method.quant_config.activation_scheme != "dynamic":
            raise NotImplementedError(
                "the CPU engine quantizes activations as they come (activation_scheme dynamic), this checkpoint stores "
                "a scale for them; serve one made by `evenkeel convert hf-to-fp8`, or use a GPU"
            )
        rows = torch.tensor(layer.logical_widths)
        scale: Tensor = layer.weight_scale.data.repeat_interleave(rows)
        return (weight.float() * scale[:, None]).to(layer.orig_dtype)
    return fake_quantize(weight, RolloutFormat.FP8_TENSOR)


def _apply(_: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    rollout_format = RolloutFormat.FP8_BLOCK if method.block_quant else RolloutFormat.FP8_TENSOR
    return F.linear(fake_quantize(x, rollout_format, per_token=True), layer.dequantized_weight, bias)


def _add_method(*_: object, **__: object) -> None:
    from sglang.srt.layers import quantization

    from rollout_sglang.cpu.emulated_layers import EmulatedConfig

    quantization.QUANTIZATION_METHODS.setdefault(EMULATED_METHOD, EmulatedConfig)
    # A separate table for CPUs with AMX, which not all releases of SGLang have.
    getattr(quantization, "CPU_QUANTIZATION_METHODS", {}).setdefault(EMULATED_METHOD, EmulatedConfig)
