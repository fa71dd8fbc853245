"""Give SGLang classes for a policy in an emulated format (rollout_sglang.cpu.quantized). Importing this module imports
SGLang, so it is imported only in a prepared server."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.utils import is_layer_skipped
from torch import Tensor

from precision.formats.formats import fake_quantize
from precision.formats.rollout_format import EMULATED_METHOD, RolloutFormat


class EmulatedLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """A linear layer whose weight arrives rounded, and whose input is rounded here."""

    def __init__(self, rollout_format: RolloutFormat) -> None:
        super().__init__()
        self.rollout_format = rollout_format

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Any:
        """Round `x` [..., in] and multiply by the weight [out, in]."""
        return super().apply(layer, fake_quantize(x, self.rollout_format, per_token=True), bias)


class EmulatedConfig(QuantizationConfig):  # type: ignore[misc]
    """The linear layers that are in the format; embeddings and the head never are."""

    def __init__(self, rollout_format: RolloutFormat, ignored: list[str], fused: dict[str, list[str]]) -> None:
        super().__init__()
        self.rollout_format = rollout_format
        self.ignored = ignored
        self.packed_modules_mapping = fused

    def get_name(self) -> str:
        return EMULATED_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # no CUDA

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # all is in config.json

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EmulatedConfig:
        """Build the config. Raises ValueError for a format that is not emulated."""
        rollout_format = RolloutFormat.named(config["format"])
        if not rollout_format.is_emulated:
            raise ValueError(f"config.json asks for {rollout_format} to be emulated; publish the policy again")
        return cls(rollout_format, list(config.get("ignored_layers", ())), config.get("packed_modules_mapping") or {})

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if not isinstance(layer, LinearBase):
            return None
        if is_layer_skipped(prefix, self.ignored, fused_mapping=self.packed_modules_mapping):
            return UnquantizedLinearMethod()
        return EmulatedLinearMethod(self.rollout_format)

    def get_scaled_act_names(self) -> list[str]:
        return []
