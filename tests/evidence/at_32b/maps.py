"""The quant maps that are compared: which format each group of linears has, in which layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from precision.formats.formats import (
    fake_quantize_activation,
    fake_quantize_block,
    fake_quantize_channel,
    fake_quantize_mxfp8,
    fake_quantize_tensor,
)
from precision.formats.rollout_format import BLOCK

GROUPS = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class Format:
    """How a linear is computed: `weight(rows, amax of the group)` and `activation(values)`, quantized and back."""

    name: str
    weight: Callable[[Tensor, Tensor], Tensor]
    activation: Callable[[Tensor], Tensor]


FORMATS = {
    one.name: one
    for one in (
        Format("fp8_block", lambda w, _: fake_quantize_block(w), lambda x: fake_quantize_activation(x, BLOCK[1])),
        Format("fp8_tensor", fake_quantize_tensor, fake_quantize_activation),
        Format("fp8_channel", lambda w, _: fake_quantize_channel(w), fake_quantize_activation),
        Format("mxfp8", lambda w, _: fake_quantize_mxfp8(w), fake_quantize_mxfp8),
    )
}


@dataclass(frozen=True)
class Map:
    """One arm of the study."""

    name: str
    title: str
    base: str | None
    """Name of a format; None: no linear is quantized."""
    groups: tuple[str, ...] = GROUPS
    """Groups that have the base format; the others stay in full precision."""
    kept_layers: int = 0
    """So many first and so many last layers stay in full precision."""
    bf16: bool = False
    """Every operation's result is rounded to BF16, instead of FP32."""
    fp8_kv: bool = False
    """Keys and values pass through e4m3 with one scale for each."""

    def format_of(self, layer: int, num_layers: int, group: str) -> str | None:
        if layer < self.kept_layers or layer >= num_layers - self.kept_layers:
            return None
        return self.base if group in self.groups else None


REFERENCE = Map("reference", "FP32 on BF16 weights", None)
BF16 = Map("bf16", "BF16", None, bf16=True)
UNIFORM = tuple(
    Map(name, title, name)
    for name, title in (
        ("fp8_block", "FP8, 128×128 blocks"),
        ("fp8_tensor", "FP8, one scale a matrix"),
        ("fp8_channel", "FP8, one scale a row"),
        ("mxfp8", "MXFP8"),
    )
)
PROMOTED = (
    Map("block_down", "blocks, down_proj in BF16", "fp8_block", groups=("qkv", "o", "gate_up")),
    Map("block_o", "blocks, o_proj in BF16", "fp8_block", groups=("qkv", "gate_up", "down")),
    Map("block_down_o", "blocks, down_proj and o_proj in BF16", "fp8_block", groups=("qkv", "gate_up")),
)
ENDS = (
    Map("block_ends1", "blocks, first and last layer in BF16", "fp8_block", kept_layers=1),
    Map("block_ends2", "blocks, first and last two layers in BF16", "fp8_block", kept_layers=2),
)
ALONE = tuple(Map(f"only_{group}", f"blocks, only {group}", "fp8_block", groups=(group,)) for group in GROUPS)
KV = (Map("block_kv", "blocks and an FP8 KV cache", "fp8_block", fp8_kv=True),)

WIDE: tuple[Map, ...] = (REFERENCE, BF16, *UNIFORM, *PROMOTED, *ALONE, *KV)
"""All that do not know where the last layer is."""
