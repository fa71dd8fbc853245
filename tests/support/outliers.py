"""Plants outlier channels in a model folder: the function stays the same, but one layer does not survive FP8."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

OUTLIER = 2.0**18
"""e4m3 holds 2^14.8 between its largest value and its smallest normal one; a power of two changes no bit of fp32."""


def plant_outlier_channels(model: Path, layer: int, channels: int = 4) -> None:
    """Scale `channels` rows of up_proj up and the columns of down_proj that read them down.

    As in SwiGLU models whose gated product spikes in a few channels: their neighbours underflow beside them where the
    activation is quantized, and their own weights underflow in down_proj.
    """
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors[f"model.layers.{layer}.mlp.up_proj.weight"][:channels] *= OUTLIER
    tensors[f"model.layers.{layer}.mlp.down_proj.weight"][:, :channels] /= OUTLIER
    save_file(tensors, path, metadata={"format": "pt"})
