"""Tiny random Qwen3 checkpoints with a byte-level tokenizer, and what transformers says about them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from precision.formats.formats import fake_quantize, quantize_block
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import RolloutFormat
from rollout_sglang.server.start import EngineSpec

VOCABULARY = 512
END = "<|im_end|>"


def write_checkpoint(directory: Path, seed: int) -> Path:
    """A float32 checkpoint of two layers, whose widths fit 128×128 blocks."""
    tokenizer = _byte_tokenizer()
    tokenizer.save_pretrained(directory)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=EngineSpec.context_tokens,  # engines are tried at the model's limit
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(directory)
    return directory


def write_block_checkpoint(source: Path, directory: Path) -> Path:
    """`source` with the linear layers of its blocks stored as e4m3 and `weight_scale_inv`."""
    shutil.copytree(source, directory)
    stored: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale_inv"] = quantize_block(weight)
        else:
            stored[name] = weight
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def reference_model(directory: Path, formats: RolloutFormat | QuantMap | None = None) -> nn.Module:
    """transformers in float32; with formats, its linear layers see e4m3 weights and activations as an engine does."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if isinstance(formats, RolloutFormat):
        formats = QuantMap.for_decoder(len(list(model.get_submodule("model.layers").children())), formats)
    for group in () if formats is None else formats.fused_groups:
        if group[0] in formats.formats:
            _quantize([model.get_submodule(name) for name in group], formats.formats[group[0]])
    return model


@torch.no_grad()
def reference_logprobs(model: nn.Module, tokens: Sequence[int], temperature: float = 1.0) -> NDArray[np.float32]:
    """[n - 1] log-probabilities of tokens 1…n-1 given those before."""
    row = torch.tensor([list(tokens)])
    logits: Tensor = model(row).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, row[0, 1:, None])[:, 0].numpy()


def _quantize(layers: Sequence[Any], rollout_format: RolloutFormat) -> None:
    """`layers`: what an engine multiplies by at once, and what therefore shares a scale of fp8_tensor."""
    amax = torch.stack([layer.weight.detach().abs().amax() for layer in layers]).amax()
    for layer in layers:
        shared = amax if rollout_format is RolloutFormat.FP8_TENSOR else None
        layer.weight.data = fake_quantize(layer.weight.detach(), rollout_format, amax=shared)
        layer.forward = _QuantizedForward(layer, rollout_format)


class _QuantizedForward:
    def __init__(self, layer: Any, rollout_format: RolloutFormat) -> None:
        self._layer, self._format = layer, rollout_format

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(fake_quantize(x, self._format, per_token=True), self._layer.weight, self._layer.bias)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate([*letters, "<|endoftext|>", END])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>")
