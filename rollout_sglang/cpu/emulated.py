"""Formats that no GPU path serves, emulated in SGLang's linear layers on a CPU: emulated_fp6, emulated_fp4,
emulated_nvfp4 and emulated_mxfp4 (precision.formats.rollout_format).

The learner sends weights that are rounded already, in the engine's own dtype: nothing is quantized here after loading,
checksums are those of what was sent, and weights are the learner's bit for bit. What is left to the engine is to round
the input of each linear layer.

    config.json of a policy   {"quant_method": "evenkeel_emulated", "format": "emulated_fp4", "ignored_layers": […]}
    SGLang                    looks for a method of that name in its table, to which it is added here

An engine without this module knows no such method and refuses the folder.
"""

from __future__ import annotations

from precision.formats.rollout_format import EMULATED_METHOD

_VERIFY = "sglang.srt.configs.model_config.ModelConfig._verify_quantization"


def register_hooks() -> None:
    """Have SGLang know the method before it looks at a folder. Once a process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_VERIFY, _add_method, HookType.BEFORE)


def _add_method(*_: object, **__: object) -> None:
    from sglang.srt.layers import quantization

    from rollout_sglang.cpu.emulated_layers import EmulatedConfig

    quantization.QUANTIZATION_METHODS.setdefault(EMULATED_METHOD, EmulatedConfig)
    # A table of its own for CPUs with AMX, which not all releases of SGLang have.
    getattr(quantization, "CPU_QUANTIZATION_METHODS", {}).setdefault(EMULATED_METHOD, EmulatedConfig)
