"""A decoder of Qwen3's form, run layer by layer under all quant maps at once, its weights made when they are needed.

Each map has a residual stream of its own. A layer's weights are made once, quantized once a format, multiplied by the
activations of all maps that have it, and forgotten: a true 32B layer takes less than 2 GiB.

Projections into the residual stream are scaled so that the reference writes 1 (root mean square over the ordinary
channels), hence the stream grows as the square root of the depth, as in trained pre-norm models. With `flat` they are
divided by sqrt(2 layers), as in GPT-2's initialization: the embedding then stays the largest part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from precision.formats.formats import fake_quantize_tensor
from tests.evidence.at_32b.maps import FORMATS, REFERENCE, Map
from tests.evidence.at_32b.weights import QK_GAIN, Sizes, Weights

ROWS_AT_ONCE = 1024
ROPE_BASE = 1e6
Streams = dict[str, Tensor]
"""Map → [rows, length, hidden], float32."""


@dataclass
class Decoder:
    """The models of one case."""

    weights: Weights
    num_layers: int
    maps: Sequence[Map]
    flat: bool = False

    def embed(self, rows: int, length: int) -> Streams:
        """The same random stream of unit size for every map: embeddings are not quantized."""
        shape = (rows, length, self.sizes.hidden)
        hidden = torch.randn(shape, generator=self.weights.generator("embedding"))
        return {one.name: hidden.clone() for one in self.maps}

    @property
    def sizes(self) -> Sizes:
        return self.weights.sizes

    def layer(self, index: int, streams: Streams, local: dict[str, float] | None = None) -> Streams:
        """Through one layer. `local` takes, by `group.format`, the relative error of each product on the reference's
        input alone."""
        normed = self._normed(index, "attention", streams)
        qkv = self._multiply(index, "qkv", normed, local)
        attended = {one.name: self._attend(one, *qkv[one.name]) for one in self.maps}
        written = {name: parts[0] for name, parts in self._multiply(index, "o", attended, local).items()}
        streams = self._write(streams, written)
        normed = self._normed(index, "mlp", streams)
        gated: Streams = {}
        for name, (gate, up) in self._multiply(index, "gate_up", normed, local).items():
            gated[name] = self._stored(name, F.silu(gate) * up)
        written = {name: parts[0] for name, parts in self._multiply(index, "down", gated, local).items()}
        return self._write(streams, written)

    def _stored(self, name: str, values: Tensor) -> Tensor:
        return values.bfloat16().float() if self._by_name(name).bf16 else values

    def _by_name(self, name: str) -> Map:
        return next(one for one in self.maps if one.name == name)

    def _normed(self, layer: int, name: str, streams: Streams) -> Streams:
        gains = self.weights.gains(layer, name)
        return {key: self._stored(key, rms_norm(hidden) * gains) for key, hidden in streams.items()}

    def _write(self, streams: Streams, written: Streams) -> Streams:
        reference = written[REFERENCE.name]
        # Median, so that outlier channels do not set the size of the others.
        size = reference.abs().median().item() / 0.6745
        factor = 1.0 / size / ((2 * self.num_layers) ** 0.5 if self.flat else 1.0)
        return {name: self._stored(name, hidden + factor * written[name]) for name, hidden in streams.items()}

    def _multiply(
        self, layer: int, group: str, inputs: Streams, local: dict[str, float] | None
    ) -> dict[str, list[Tensor]]:
        """Map → [rows, length, out] of each matrix of the group."""
        matrices = self.weights.group(layer, group)
        largest = torch.stack([matrix.abs().amax().float() for matrix in matrices]).amax()
        by_format: dict[str | None, list[str]] = {}
        for one in self.maps:
            by_format.setdefault(one.format_of(layer, self.num_layers, group), []).append(one.name)
        flat = {name: values.reshape(-1, values.shape[-1]) for name, values in inputs.items()}
        reference = flat[REFERENCE.name]
        stacked = {}
        for name, arms in by_format.items():
            rows = [flat[arm] for arm in arms] + ([reference] if local is not None and name is not None else [])
            stacked[name] = torch.cat(rows) if name is None else FORMATS[name].activation(torch.cat(rows))
        products = {name: [_product(m, largest, name, rows) for m in matrices] for name, rows in stacked.items()}
        results: dict[str, list[Tensor]] = {}
        shape = inputs[REFERENCE.name].shape[:-1]
        for name, arms in by_format.items():
            for place, arm in enumerate(arms):
                part = slice(place * len(reference), (place + 1) * len(reference))
                results[arm] = [self._stored(arm, p[part].reshape(*shape, -1)) for p in products[name]]
        if local is not None:
            truth = torch.cat([p.reshape(len(reference), -1) for p in results[REFERENCE.name]], dim=-1)
            for name in by_format.keys() - {None}:
                found = torch.cat([p[-len(reference) :] for p in products[name]], dim=-1)
                local[f"{group}.{name}"] = float((found - truth).norm() / truth.norm())
        return results

    def _attend(self, one: Map, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        size, length = self.sizes, queries.shape[1]

        def heads(flat: Tensor) -> Tensor:
            return flat.reshape(*flat.shape[:2], -1, size.head_dim).transpose(1, 2)

        q, k, v = heads(queries), heads(keys), heads(values)
        q, k = (self._stored(one.name, _rotated(rms_norm(part) * QK_GAIN, length)) for part in (q, k))
        if one.fp8_kv:
            k, v = fake_quantize_tensor(k), fake_quantize_tensor(v)
        repeat = size.heads // size.kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._stored(one.name, attended.transpose(1, 2).flatten(2))


def _product(matrix: Tensor, largest: Tensor, name: str | None, rows: Tensor) -> Tensor:
    """rows [n, in] times matrix [out, in] in FP32, the matrix in a format."""
    result = torch.empty(len(rows), len(matrix))
    for start in range(0, len(matrix), ROWS_AT_ONCE):
        part = matrix[start : start + ROWS_AT_ONCE].float()
        if name is not None:
            part = FORMATS[name].weight(part, largest)
        result[:, start : start + ROWS_AT_ONCE] = rows @ part.T
    return result


def rms_norm(values: Tensor) -> Tensor:
    return values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + 1e-6)


def _rotated(values: Tensor, length: int) -> Tensor:
    """Rotary embedding of [rows, heads, length, head_dim]."""
    half = values.shape[-1] // 2
    angles = torch.arange(length)[:, None] * ROPE_BASE ** (-torch.arange(half) / half)
    first, second = values[..., :half], values[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
