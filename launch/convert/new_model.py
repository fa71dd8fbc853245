"""A random Qwen3 or Qwen3-MoE HF checkpoint, written tensor by tensor: no transformers, no download.

Made for models that learn a toy task in minutes, so weights start larger than the usual 0.02 of large models: each
matrix keeps unit variance (std fan_in^-0.5), and the two that write into the residual stream are divided by
sqrt(2 · layers), as in GPT-2 (Radford et al. 2019, section 2.3).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from megatron_bridge.hf.model_config import Experts, ModelConfig, read_config
from pipeline.data.files import amount, move_to_free_name, remove_leftovers_of, temporary_name
from pipeline.errors import ModelError
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer

if TYPE_CHECKING:
    from torch import Generator, Tensor

VOCABULARY_MULTIPLE = 16
"""The vocabulary is padded to this, so that tensor parallelism up to 16 divides it."""

EMBEDDING_STD, HEAD_STD = 0.5, 0.02
"""A small head starts the policy near uniform. A tied embedding is the head as well and starts with HEAD_STD."""

DEFAULT_CHARACTERS = "0123456789+-*=,;:abcdefghijklmnopqrstuvwxyz "


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the model. Raises ModelError at construction when they do not fit together."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_position: int
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if isinstance(size, int) and size < 1:
                raise ModelError(f"{name} is {size}, expected a positive number; raise it")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; each key/value head serves equally "
                "many query heads, so change one of them"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}, but rotary embedding turns pairs; use an even number")


def new_model(
    directory: Path,
    *,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    ffn: int = 384,
    experts: int | None = None,
    experts_per_token: int | None = None,
    expert_ffn: int | None = None,
    characters: str = DEFAULT_CHARACTERS,
    tie: bool = False,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    max_position: int = 4096,
) -> None:
    """Write config, weights, generation config and character tokenizer into `directory`, which must be new or empty.

    With `experts`, every layer is a mixture of so many, `experts_per_token` (default 2) of width `expert_ffn` (default
    `ffn`) at a time. Raises ModelError when the folder is taken, the sizes do not fit together, or the alphabet is
    empty or repeats.
    """
    sizes = Sizes(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        max_position=max_position,
        experts=_experts(experts, experts_per_token, expert_ffn, ffn),
    )
    with _new_folder(directory) as folder:
        special = _write_tokenizer(folder, characters, dtype)
        rows = -(-Tokenizer(folder).vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        _write_weights(folder, sizes, rows, tie=tie, seed=seed, dtype=dtype)
        _write_json(folder / "config.json", _config(sizes, rows, tie=tie, dtype=dtype) | special)


def new_model_like(directory: Path, config: Path, *, characters: str = DEFAULT_CHARACTERS, seed: int = 0) -> None:
    """A random model of the sizes, vocabulary and dtype of the `config.json` in the folder `config`, with a character
    tokenizer: its tokens are the first rows of the vocabulary.

    Raises ModelError when the config is none of a Qwen3 or Qwen3-MoE model, and for what `new_model` refuses.
    """
    hf_config = read_config(config)
    model = ModelConfig.from_hf(hf_config)
    if not model.qk_norm:
        raise ModelError(f"{config} describes {model.architecture}, expected Qwen3 or Qwen3-MoE; give such a folder")
    dtype = str(hf_config.get("torch_dtype", hf_config.get("dtype", "float32")))
    sizes = Sizes(
        hidden=model.hidden_size,
        layers=model.num_layers,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        ffn=model.ffn_size,
        max_position=model.max_positions,
        experts=model.experts,
    )
    with _new_folder(directory) as folder:
        special = _write_tokenizer(folder, characters, dtype, rows=model.vocab_size)
        _write_weights(folder, sizes, model.vocab_size, tie=model.tied_embeddings, seed=seed, dtype=dtype)
        kept = {name: value for name, value in hf_config.items() if name != "bos_token_id"}
        _write_json(folder / "config.json", kept | special)


@contextmanager
def _new_folder(directory: Path) -> Iterator[Path]:
    """A folder that gets the name once all of it is written. Raises ModelError when the name is taken."""
    taken = f"{directory} exists and is not an empty folder; choose another name or delete it"
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ModelError(taken)
    target = directory.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers_of(target)
    folder = temporary_name(target)
    folder.mkdir()
    try:
        yield folder
        if not move_to_free_name(folder, target):
            raise ModelError(taken)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_tokenizer(directory: Path, characters: str, dtype: str, *, rows: int | None = None) -> dict[str, int]:
    """Tokenizer and generation config; the ids of special tokens. Raises ModelError."""
    if dtype not in ("float32", "bfloat16"):
        raise ModelError(f"dtype is {dtype!r}, expected float32 or bfloat16")
    if not characters or len(set(characters)) != len(characters):
        raise ModelError(f"characters are {characters!r}, expected at least one and none twice; correct the alphabet")
    if rows is not None and len(characters) + 2 > rows:
        raise ModelError(f"{len(characters)} characters and 2 special tokens need more than vocab_size {rows} rows")
    write_character_tokenizer(directory, characters)
    tokenizer = Tokenizer(directory)
    special = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    _write_json(directory / "generation_config.json", special | dict(do_sample=True))
    return special


def _experts(count: int | None, per_token: int | None, expert_ffn: int | None, ffn: int) -> Experts | None:
    if count is None:
        if per_token is not None or expert_ffn is not None:
            raise ModelError("experts_per_token and expert_ffn describe experts, but there are none; give experts too")
        return None
    experts = Experts(
        count=count,
        per_token=min(2, count) if per_token is None else per_token,
        ffn_size=ffn if expert_ffn is None else expert_ffn,
        normalized=True,
    )
    for name, size in (("experts", count), ("experts_per_token", experts.per_token), ("expert_ffn", experts.ffn_size)):
        if size < 1:
            raise ModelError(f"{name} is {size}, expected a positive number; raise it")
    if experts.per_token > count:
        raise ModelError(f"experts_per_token is {experts.per_token}, expected at most experts {count}; lower it")
    return experts


def _config(sizes: Sizes, rows: int, *, tie: bool, dtype: str) -> dict[str, Any]:
    """config.json; RoPE is named twice, for readers before and after transformers 5."""
    return dict(
        **_family(sizes.experts),
        vocab_size=rows,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        hidden_act="silu",
        max_position_embeddings=sizes.max_position,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        attention_bias=False,
        attention_dropout=0.0,
        use_sliding_window=False,
        initializer_range=HEAD_STD,
        tie_word_embeddings=tie,
        torch_dtype=dtype,
    )


def _family(experts: Experts | None) -> dict[str, Any]:
    if experts is None:
        return dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    return dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=experts.count,
        num_experts_per_tok=experts.per_token,
        moe_intermediate_size=experts.ffn_size,
        norm_topk_prob=experts.normalized,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        output_router_logits=False,
        router_aux_loss_coef=0.0,
    )


def _write_weights(directory: Path, sizes: Sizes, rows: int, *, tie: bool, seed: int, dtype: str) -> None:
    _require_memory(sizes, rows, tie=tie)
    # torch is imported here, not above, so that the command line starts without it.
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {"model.embed_tokens.weight": _normal(generator, rows, sizes.hidden, HEAD_STD if tie else EMBEDDING_STD)}
    for layer in range(sizes.layers):
        tensors |= {f"model.layers.{layer}.{name}": t for name, t in _layer(generator, sizes).items()}
    tensors["model.norm.weight"] = torch.ones(sizes.hidden)
    if not tie:
        tensors["lm_head.weight"] = _normal(generator, rows, sizes.hidden, HEAD_STD)
    number_format = getattr(torch, dtype)
    stored = {name: tensor.to(number_format).contiguous() for name, tensor in tensors.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})


def _require_memory(sizes: Sizes, rows: int, *, tie: bool) -> None:
    """Raises ModelError for weights that do not fit into this machine's memory, where they are made."""
    widths = sizes.ffn if sizes.experts is None else sizes.experts.count * (sizes.experts.ffn_size + 1)
    layer = sizes.hidden * ((2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim + 3 * widths + 2)
    needed = 4 * (sizes.layers * layer + rows * sizes.hidden * (1 if tie else 2))
    if needed > (free := psutil.virtual_memory().available):
        raise ModelError(
            f"the weights of these sizes take {amount(needed)} while they are made, and {amount(free)} of memory are "
            "free; make it smaller"
        )


def _layer(generator: Generator, sizes: Sizes) -> dict[str, Tensor]:
    """Weights of one decoder layer by their HF names, float32."""
    import torch

    hidden, attention = sizes.hidden, sizes.heads * sizes.head_dim
    key_value = sizes.kv_heads * sizes.head_dim
    inward, residual = hidden**-0.5, (2 * sizes.layers) ** -0.5
    return {
        "self_attn.q_proj.weight": _normal(generator, attention, hidden, inward),
        "self_attn.k_proj.weight": _normal(generator, key_value, hidden, inward),
        "self_attn.v_proj.weight": _normal(generator, key_value, hidden, inward),
        "self_attn.o_proj.weight": _normal(generator, hidden, attention, residual / math.sqrt(attention)),
        "self_attn.q_norm.weight": torch.ones(sizes.head_dim),
        "self_attn.k_norm.weight": torch.ones(sizes.head_dim),
        **_mlp(generator, sizes),
        "input_layernorm.weight": torch.ones(hidden),
        "post_attention_layernorm.weight": torch.ones(hidden),
    }


def _mlp(generator: Generator, sizes: Sizes) -> dict[str, Tensor]:
    inward, residual = sizes.hidden**-0.5, (2 * sizes.layers) ** -0.5

    def swiglu(prefix: str, width: int) -> dict[str, Tensor]:
        return {
            f"{prefix}gate_proj.weight": _normal(generator, width, sizes.hidden, inward),
            f"{prefix}up_proj.weight": _normal(generator, width, sizes.hidden, inward),
            f"{prefix}down_proj.weight": _normal(generator, sizes.hidden, width, residual / math.sqrt(width)),
        }

    if sizes.experts is None:
        return swiglu("mlp.", sizes.ffn)
    tensors = {"mlp.gate.weight": _normal(generator, sizes.experts.count, sizes.hidden, inward)}
    for expert in range(sizes.experts.count):
        tensors |= swiglu(f"mlp.experts.{expert}.", sizes.experts.ffn_size)
    return tensors


def _normal(generator: Generator, rows: int, columns: int, std: float) -> Tensor:
    import torch

    return torch.randn(rows, columns, generator=generator) * std


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
