"""The model of the study: random weights with the heavy tails and the outlier channels that trained models have.

What is assumed, and where it is taken from:

    entries of a matrix   Gaussian times a lognormal scale a row and a column; one entry in 10,000 is ten times as
                          large. Excess kurtosis about 10, the largest entry of a small matrix 30 standard deviations.
    residual channels     0.1 % of them are written 20 times as large by every o and down projection, in all layers
                          alike (LLM.int8(), arXiv 2208.07339: few dimensions, all layers, about 20 times as large).
                          Norms before the linears have gains there that take a factor of 4 back.
    norm gains            lognormal (sigma 0.5) over channels.
    gated channels        0.05 % of gate and up rows are 6 times as large, so that their product spikes about 36 times
                          (arXiv 2405.14428: activation spikes in the input of down_proj).
    attention             gains of q and k norms of 1: logits have a standard deviation of about 1.

Everything is drawn from seeds that depend on the layer and the module only, so that any layer can be made again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

RARE, RARE_SCALE = 1e-4, 10.0
ROW_SIGMA, COLUMN_SIGMA, GAIN_SIGMA = 0.3, 0.3, 0.5
RESIDUAL_SHARE, RESIDUAL_SCALE, GAIN_BACK = 1e-3, 20.0, 4.0
GATED_SHARE, GATED_SCALE = 5e-4, 6.0
QK_GAIN = 1.0


@dataclass(frozen=True)
class Sizes:
    """Of a decoder, as in config.json."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int


QWEN3_32B = Sizes(hidden=5120, ffn=25600, heads=64, kv_heads=8, head_dim=128)
"""pipeline/recipes/models/qwen3-32b/config.json"""


def narrow(hidden: int) -> Sizes:
    """The proportions of Qwen3-32B, rounded: ffn 5 times the hidden size, 8 query heads for each key/value head."""
    head_dim = max(16, hidden // 16)
    return Sizes(hidden=hidden, ffn=5 * hidden, heads=16, kv_heads=2, head_dim=head_dim)


@dataclass(frozen=True)
class Weights:
    """A random decoder. `plain` takes all tails and outliers away."""

    sizes: Sizes
    seed: int
    plain: bool = False

    def generator(self, *names: object) -> torch.Generator:
        text = "/".join(map(str, (self.seed, *names)))
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        return torch.Generator().manual_seed(number)

    def group(self, layer: int, name: str) -> list[Tensor]:
        """bfloat16 matrices [out, in] of what an engine stacks: qkv, o, gate_up or down."""
        s = self.sizes
        queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
        shapes = {
            "qkv": [(queries, s.hidden), (keys, s.hidden), (keys, s.hidden)],
            "o": [(s.hidden, queries)],
            "gate_up": [(s.ffn, s.hidden), (s.ffn, s.hidden)],
            "down": [(s.hidden, s.ffn)],
        }
        spikes = self.channels("gated", s.ffn, GATED_SHARE, layer) if name == "gate_up" else None
        if name in ("o", "down"):
            spikes = self.residual_channels()
        scale = GATED_SCALE if name == "gate_up" else RESIDUAL_SCALE
        return [
            self._matrix(shape, spikes, scale, self.generator(layer, name, index))
            for index, shape in enumerate(shapes[name])
        ]

    def gains(self, layer: int, name: str) -> Tensor:
        """[hidden] of an RMS norm before a linear."""
        if self.plain:
            return torch.ones(self.sizes.hidden)
        gains = torch.exp(GAIN_SIGMA * torch.randn(self.sizes.hidden, generator=self.generator(layer, name, "gain")))
        gains[self.residual_channels()] /= GAIN_BACK
        return gains

    def residual_channels(self) -> Tensor:
        """Indices, the same in all layers."""
        return self.channels("residual", self.sizes.hidden, RESIDUAL_SHARE, "all")

    def channels(self, name: str, size: int, share: float, layer: object) -> Tensor:
        """At least one index, unless the model is plain."""
        count = 0 if self.plain else max(1, round(share * size))
        return torch.randperm(size, generator=self.generator(name, layer))[:count]

    def _matrix(
        self, shape: tuple[int, int], spikes: Tensor | None, scale: float, generator: torch.Generator
    ) -> Tensor:
        rows, columns = shape
        matrix = torch.empty(shape, dtype=torch.bfloat16)
        row_scale = torch.exp(ROW_SIGMA * torch.randn(rows, 1, generator=generator)) / columns**0.5
        column_scale = torch.exp(COLUMN_SIGMA * torch.randn(columns, generator=generator))
        if self.plain:
            row_scale, column_scale = torch.full((rows, 1), columns**-0.5), torch.ones(columns)
        elif spikes is not None:
            row_scale[spikes] *= scale
        for start in range(0, rows, 1024):
            part = torch.randn(min(1024, rows - start), columns, generator=generator)
            if not self.plain:
                count = max(1, int(RARE * part.numel()))
                part.view(-1)[torch.randint(part.numel(), (count,), generator=generator)] *= RARE_SCALE
                part *= column_scale
            matrix[start : start + 1024] = part * row_scale[start : start + 1024]
        return matrix
