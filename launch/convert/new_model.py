"""Write a random Qwen3 or Qwen3-MoE HF checkpoint, without transformers or a download.

The models learn a toy task in minutes, so weights start larger than the 0.02 of large models: each matrix keeps unit
variance (std fan_in^-0.5), and the two that write into the residual stream are divided by sqrt(2 · layers), as in GPT-2
(Radford et al. 2019, section 2.3).
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, Literal

import psutil

from megatron_bridge.hf.model_config import ModelConfig, read_config
from pipeline.data.files import amount, make_folder, move_to_free_name, remove_leftovers_of, temporary_name
from pipeline.errors import ModelError
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer

VOCABULARY_MULTIPLE = 16
"""The vocabulary is padded to a multiple of this, so that tensor parallelism up to 16 divides it."""

EMBEDDING_STD, HEAD_STD = 0.5, 0.02
"""A small head starts the policy near uniform. A tied embedding is also the head and starts with HEAD_STD."""

DEFAULT_CHARACTERS = "0123456789+-*=,;:abcdefghijklmnopqrstuvwxyz "


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

    With `experts`, every layer is a mixture that uses `experts_per_token` (default 2) of width `expert_ffn` (default
    `ffn`) per token. Raises ModelError for a taken folder, contradictory sizes, and an alphabet that is empty or
    repeats.
    """
    sizes = dict(hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn)
    sizes["max_position"] = max_position
    family: dict[str, Any] = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    if experts is not None:
        sizes["experts"] = experts
        sizes["experts_per_token"] = min(2, experts) if experts_per_token is None else experts_per_token
        sizes["expert_ffn"] = ffn if expert_ffn is None else expert_ffn
        family = dict(
            architectures=["Qwen3MoeForCausalLM"],
            model_type="qwen3_moe",
            num_experts=experts,
            num_experts_per_tok=sizes["experts_per_token"],
            moe_intermediate_size=sizes["expert_ffn"],
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            output_router_logits=False,
            router_aux_loss_coef=0.0,
        )
    elif experts_per_token is not None or expert_ffn is not None:
        raise ModelError("experts_per_token and expert_ffn describe experts, but there are none; give experts too")
    for name, size in sizes.items():
        if size < 1:
            raise ModelError(f"{name} is {size}, expected a positive number; raise it")
    if experts is not None and sizes["experts_per_token"] > experts:
        raise ModelError(
            f"experts_per_token is {sizes['experts_per_token']}, expected at most experts {experts}; lower it"
        )
    if heads % kv_heads:
        raise ModelError(
            f"heads {heads} is not a multiple of kv_heads {kv_heads}; each key/value head serves equally many query "
            "heads, so change one of them"
        )
    if head_dim % 2:
        raise ModelError(f"head_dim is {head_dim}, but rotary embedding turns pairs; use an even number")
    rows = -(-(len(characters) + 2) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE  # with end and padding tokens
    config = dict(
        **family,
        vocab_size=rows,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act="silu",
        max_position_embeddings=max_position,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),  # read by transformers from version 5 on
        attention_bias=False,
        attention_dropout=0.0,
        use_sliding_window=False,
        initializer_range=HEAD_STD,
        tie_word_embeddings=tie,
        torch_dtype=dtype,
    )
    _write(directory, config, characters, seed)


def new_model_like(directory: Path, config: Path, *, characters: str = DEFAULT_CHARACTERS, seed: int = 0) -> None:
    """Write a random model with the sizes, vocabulary and dtype of `config`/config.json, and a character tokenizer,
    whose tokens are the first rows. Raises as `new_model`, and ModelError for other models than Qwen3."""
    hf_config = read_config(config)
    model = ModelConfig.from_hf(hf_config)
    if not model.qk_norm:
        raise ModelError(f"{config} describes {model.architecture}, expected Qwen3 or Qwen3-MoE; give such a folder")
    hf_config.pop("bos_token_id", None)
    _write(directory, hf_config, characters, seed)


def _write(directory: Path, hf_config: dict[str, Any], characters: str, seed: int) -> None:
    """Write the folder atomically. Raises ModelError for a taken name, and weights that do not fit into free memory."""
    dtype = str(hf_config.get("torch_dtype", hf_config.get("dtype", "float32")))
    if dtype not in ("float32", "bfloat16"):
        raise ModelError(f"dtype is {dtype!r}, expected float32 or bfloat16")
    if not characters or len(set(characters)) != len(characters):
        raise ModelError(f"characters are {characters!r}, expected at least one and none twice; correct the alphabet")
    rows = int(hf_config["vocab_size"])
    if len(characters) + 2 > rows:
        raise ModelError(f"{len(characters)} characters and 2 special tokens need more than vocab_size {rows} rows")
    taken = f"{directory} exists and is not an empty folder; choose another name or delete it"
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ModelError(taken)
    # Checked before the sizes become a list of tensors, which may be long.
    hidden, layers, experts = hf_config["hidden_size"], hf_config["num_hidden_layers"], hf_config.get("num_experts")
    heads, kv_heads = hf_config["num_attention_heads"], hf_config.get("num_key_value_heads")
    attention = 2 * (heads + (kv_heads or heads)) * (hf_config.get("head_dim") or hidden // heads)
    width = experts * (hf_config["moe_intermediate_size"] + 1) if experts else hf_config["intermediate_size"]
    tied = hf_config.get("tie_word_embeddings", False)
    needed = 4 * (layers * hidden * (attention + 3 * width + 2) + rows * hidden * (1 if tied else 2))
    if needed > (free := psutil.virtual_memory().available):
        raise ModelError(
            f"the weights of these sizes take {amount(needed)} while they are made, and {amount(free)} of memory are "
            "free; make it smaller"
        )
    target = directory.resolve()
    make_folder(target.parent)
    remove_leftovers_of(target)
    folder = temporary_name(target)
    folder.mkdir()
    try:
        write_character_tokenizer(folder, characters)
        tokenizer = Tokenizer(folder)
        special = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
        for name, value in {"generation_config": special | dict(do_sample=True), "config": hf_config | special}.items():
            (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        _write_weights(folder / "model.safetensors", ModelConfig.from_hf(hf_config), seed, dtype)
        if not move_to_free_name(folder, target):
            raise ModelError(taken)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_weights(path: Path, config: ModelConfig, seed: int, dtype: str) -> None:
    # Imported here, so that the command line starts without torch.
    import torch
    from safetensors.torch import save_file

    generator, residual = torch.Generator().manual_seed(seed), (2 * config.num_layers) ** -0.5
    tensors = {}
    for name, size in config.tensors().items():
        if len(size) == 1:  # a norm's
            tensors[name] = torch.ones(size).to(getattr(torch, dtype))
            continue
        rows, columns = size
        if name == "lm_head.weight" or (name == "model.embed_tokens.weight" and config.tied_embeddings):
            std = HEAD_STD
        elif name == "model.embed_tokens.weight":
            std = EMBEDDING_STD
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            std = residual / math.sqrt(columns)
        else:
            std = columns**-0.5
        tensors[name] = (torch.randn(rows, columns, generator=generator) * std).to(getattr(torch, dtype))
    save_file(tensors, path, metadata={"format": "pt"})
