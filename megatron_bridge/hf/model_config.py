"""Read a decoder's sizes, biases, experts and rotary embedding from an HF config.json. Plain data, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.data.files import MODEL_JSON_BYTES, read_at_most
from pipeline.errors import ModelError
from precision.formats.rollout_format import STACKS, qkv_rows
from precision.text import parse_object, quoted

_MOST = 2**31 - 1
_MOST_LAYERS = 4096
_MOST_EXPERTS = 4096
"""Far above any model: a wrong number is refused before names for so many layers' tensors are built."""
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")

_LEFT_OUT: dict[str, dict[str, int]] = {
    "Qwen3ForCausalLM": dict(head_dim=128, num_key_value_heads=32),
    "Qwen3MoeForCausalLM": dict(num_key_value_heads=4),
    "Qwen2ForCausalLM": dict(num_key_value_heads=32),
}
"""Values that transformers and SGLang use for missing keys of a config.json (not for null, nor for Llama)."""


MEGATRON_ENDS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
"""Megatron-Core's parameters outside the layers → Hugging Face tensors."""
MEGATRON_LAYER: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"), ("input_layernorm.weight",)),
    (("self_attention.linear_qkv.weight",), tuple(f"self_attn.{part}.weight" for part in STACKS["qkv_proj"])),
    (("self_attention.linear_qkv.bias",), tuple(f"self_attn.{part}.bias" for part in STACKS["qkv_proj"])),
    (("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",)),
    (("self_attention.k_layernorm.weight",), ("self_attn.k_norm.weight",)),
    (("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",)),
    (("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"), ("post_attention_layernorm.weight",)),
    (("mlp.linear_fc1.weight",), ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    (("mlp.linear_fc2.weight",), ("mlp.down_proj.weight",)),
    (("mlp.router.weight",), ("mlp.gate.weight",)),
)
"""Parameters of a layer: Megatron-Core's names, TE's first (TE fuses norms into the next linear), and the Hugging Face
tensors that the parameter holds one after another."""
MEGATRON_EXPERT = {
    "linear_fc1.weight": ("gate_proj.weight", "up_proj.weight"),
    "linear_fc2.weight": ("down_proj.weight",),
}
"""Parameters of an expert, likewise."""


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Llama 3.1's scaling of rotary frequencies; Megatron-Core hard-codes its other constants."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of SwiGLU experts in every layer: the best of a softmax over all are taken; none is shared."""

    count: int
    per_token: int
    ffn_size: int
    """Inner width of one expert (`moe_intermediate_size`)."""
    normalized: bool
    """Whether the weights of the chosen experts are divided by their sum (`norm_topk_prob`)."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder with RMSNorm, SwiGLU (dense or experts), grouped-query attention and rotary positions."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Inner width of the dense MLP; unused with experts."""
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RotaryScaling | None
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    experts: Experts | None = None

    @staticmethod
    def from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
        """Read an HF config. Raises ModelError for architectures and settings that this learner cannot reproduce."""
        architecture = architecture_of(hf_config)
        if architecture not in ARCHITECTURES:
            raise ModelError(
                f"config.json: architecture {quoted(architecture) if architecture else '(missing)'} is not supported; "
                f"use one of {', '.join(ARCHITECTURES)}"
            )
        hf_config = {**_LEFT_OUT.get(architecture, {}), **hf_config}
        quantization = hf_config.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            raise ModelError(
                f"config.json: quantization_config says {quoted(method)}: the weights are quantized, and a learner "
                "trains unquantized ones; give the bf16 folder of this model, and quantize the rollouts "
                "(rollout.precision)"
            )
        wanted: dict[str, tuple[Any, ...]] = {
            "hidden_act": ("silu", None),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
            "use_sliding_window": (False, None),
            "decoder_sparse_step": (1, None),
            "mlp_only_layers": ([], None),
        }
        for key, allowed in wanted.items():
            value = hf_config.get(key)
            if not any(value == one and type(value) is type(one) for one in allowed):
                raise ModelError(
                    f"config.json: {key} is {quoted(hf_config[key])}, but only {allowed[0]!r} is supported; use "
                    "another model"
                )
        theta, scaling = _rope(hf_config)
        heads = size_of(hf_config, "num_attention_heads")
        usual = dict(num_key_value_heads=heads, head_dim=max(1, size_of(hf_config, "hidden_size") // heads))
        sizes = usual | {key: hf_config[key] for key in usual if hf_config.get(key) is not None}
        return ModelConfig(
            architecture=architecture,
            num_layers=size_of(hf_config, "num_hidden_layers", _MOST_LAYERS),
            hidden_size=size_of(hf_config, "hidden_size"),
            num_heads=heads,
            num_kv_heads=size_of(sizes, "num_key_value_heads"),
            head_dim=size_of(sizes, "head_dim"),
            ffn_size=size_of(hf_config, "intermediate_size"),
            vocab_size=size_of(hf_config, "vocab_size"),
            max_positions=size_of(hf_config, "max_position_embeddings"),
            norm_eps=_positive(hf_config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling,
            tied_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "Qwen2ForCausalLM",
            qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
            experts=_experts(hf_config) if architecture == "Qwen3MoeForCausalLM" else None,
        )

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of q, k and v in each layer."""
        return qkv_rows(self.num_heads, self.num_kv_heads, self.head_dim)

    def vocabulary_rows(self, tensor_parallel: int) -> int:
        """Return the rows of embedding and head in a learner. If the tensor parallel ranks cannot share the vocabulary
        evenly, Megatron pads it to a multiple of 128 for each rank. Padding has no probability and is not exported."""
        multiple = 128 * tensor_parallel if self.vocab_size % tensor_parallel else 1
        return -(-self.vocab_size // multiple) * multiple

    @property
    def num_parameters(self) -> int:
        """Number of values in all weights; a tied embedding counts once."""
        return sum(math.prod(size) for size in self.tensors().values())

    @property
    def attention_parity(self) -> int:
        """Length of a row whose causal attention takes as much arithmetic as its products with weights; for a row twice
        as long, attention takes twice as much as the products."""
        q, k, v = self.qkv_rows
        ffn = self.ffn_size if self.experts is None else self.experts.per_token * self.experts.ffn_size
        layer = self.hidden_size * (2 * q + k + v + 3 * ffn)
        return (self.num_layers * layer + self.vocab_size * self.hidden_size) // (self.num_layers * q)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return HF name → shape of every weight of the model, in layer order."""
        h = self.hidden_size
        rows = dict(zip(STACKS["qkv_proj"], self.qkv_rows, strict=True))
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (h,),
            **{f"self_attn.{part}.weight": (count, h) for part, count in rows.items()},
            "self_attn.o_proj.weight": (h, rows["q_proj"]),
            "post_attention_layernorm.weight": (h,),
        }
        if self.experts is None:
            layer |= _swiglu("mlp.", h, self.ffn_size)
        else:
            layer["mlp.gate.weight"] = (self.experts.count, h)
            for expert in range(self.experts.count):
                layer |= _swiglu(f"mlp.experts.{expert}.", h, self.experts.ffn_size)
        if self.qkv_bias:
            layer |= {f"self_attn.{part}.bias": (count,) for part, count in rows.items()}
        if self.qk_norm:
            layer |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, h)}
        for index in range(self.num_layers):
            tensors |= {f"model.layers.{index}.{name}": size for name, size in layer.items()}
        tensors["model.norm.weight"] = (h,)
        if not self.tied_embeddings:
            tensors["lm_head.weight"] = (self.vocab_size, h)
        return tensors


def _swiglu(prefix: str, hidden_size: int, ffn_size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (ffn_size, hidden_size),
        f"{prefix}up_proj.weight": (ffn_size, hidden_size),
        f"{prefix}down_proj.weight": (hidden_size, ffn_size),
    }


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a folder, with or without weights. Raises ModelError."""
    try:
        return parse_object(read_at_most(folder / "config.json", MODEL_JSON_BYTES))
    except FileNotFoundError:
        raise ModelError(
            f"{folder} has no config.json; give the folder that holds config.json and safetensors"
        ) from None
    except OSError as error:
        raise ModelError(f"cannot read {folder / 'config.json'}: {error.strerror}; fetch the model again") from error
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'} is damaged: {error}; fetch the model again") from None


def read_hf_config(folder: Path, key: str = "model.path") -> dict[str, Any]:
    """Read config.json of the model folder at the recipe's `key`. Raises ModelError for an unusable HF folder."""
    if not folder.is_dir():
        name = folder if not folder.is_absolute() and len(folder.parts) == 2 else "OWNER/NAME"
        raise ModelError(
            f"{key} {folder} is not a folder; give the path of a downloaded HF model (`hf download {name} --local-dir "
            "FOLDER`, of `pip install huggingface_hub`, fetches one), or make a small one with `evenkeel model new`"
        )
    hf_config = read_config(folder)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{key} {folder} has no *.safetensors; convert the weights to safetensors")
    return hf_config


def architecture_of(hf_config: Mapping[str, Any]) -> str:
    """Return the first architecture that a config.json names, or ""."""
    names = hf_config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def size_of(hf_config: Mapping[str, Any], key: str, most: int = _MOST) -> int:
    """Return a size from config.json. Raises ModelError unless it is a whole number from 1 to `most`."""
    value = hf_config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ModelError(
            f"config.json: {key} is {quoted(value)}, expected a whole number from 1 to {most}; check the model folder"
        )
    return value


def _positive(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {key} is {quoted(value)}, expected a positive number; check the model folder")
    return float(value)


def _experts(hf_config: Mapping[str, Any]) -> Experts:
    """Return the mixture of a Qwen3-MoE config, in which every layer has the same experts."""
    # Newer transformers releases call the number of experts num_local_experts.
    key = "num_experts" if "num_experts" in hf_config else "num_local_experts"
    experts = Experts(
        count=size_of(hf_config, key, _MOST_EXPERTS),
        per_token=size_of(hf_config, "num_experts_per_tok"),
        ffn_size=size_of(hf_config, "moe_intermediate_size"),
        normalized=bool(hf_config.get("norm_topk_prob", False)),
    )
    if experts.per_token > experts.count:
        raise ModelError(
            f"config.json: num_experts_per_tok is {experts.per_token}, expected at most {key} {experts.count}; "
            "check the model folder"
        )
    return experts


def _rope(hf_config: Mapping[str, Any]) -> tuple[float, RotaryScaling | None]:
    """Return base and scaling, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling`."""
    scaling = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"config.json: rope_scaling is {quoted(scaling)}, expected an object; check the model folder")
    theta = _positive(scaling.get("rope_theta", hf_config.get("rope_theta", 10_000.0)), "rope_theta")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if (part := scaling.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"config.json: partial_rotary_factor is {quoted(part)}, but only 1.0 is supported")
    if kind == "default":
        return theta, None
    # Megatron-Core's rope_scaling takes the factor and fixes the other values at Llama 3.1's.
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(scaling.get(key, 0) == value for key, value in fixed.items()):
        return theta, RotaryScaling(factor=_positive(scaling.get("factor"), "rope_scaling.factor"))
    raise ModelError(
        f"config.json: rope scaling {quoted(kind)} with {quoted(scaling)} is not supported; allowed are 'default', and "
        f"'llama3' with {fixed}"
    )
