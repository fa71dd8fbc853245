"""HF tensor ⇄ its place in a Megatron distributed checkpoint, whatever layout wrote it.

A checkpoint holds whole tensors: layers are stacked along the first dimension (experts along the second), q, k and v
are interleaved by key/value head, gate and up follow one another. Written without the code that loads and exports
models, so that a conversion can be checked against a second statement of the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge.checkpoint.dcp_reader import CheckpointIndex, StoredTensor
from megatron_bridge.hf.model_config import ModelConfig
from pipeline.errors import CorruptCheckpointError

_MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.")

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_VOCABULARY = (_TOP["embedding.word_embeddings.weight"], _TOP["output_layer.weight"])

# Megatron names (the first that the checkpoint has), HF names.
_LAYER: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"), ("input_layernorm.weight",)),
    (
        ("self_attention.linear_qkv.weight",),
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    (
        ("self_attention.linear_qkv.bias",),
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ),
    (("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",)),
    (("self_attention.k_layernorm.weight",), ("self_attn.k_norm.weight",)),
    (("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",)),
    (
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("post_attention_layernorm.weight",),
    ),
    (("mlp.linear_fc1.weight",), ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    (("mlp.linear_fc2.weight",), ("mlp.down_proj.weight",)),
    (("mlp.router.weight",), ("mlp.gate.weight",)),
)

_EXPERT: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("mlp.experts.experts.linear_fc1.weight",), ("gate_proj.weight", "up_proj.weight")),
    (("mlp.experts.experts.linear_fc2.weight",), ("down_proj.weight",)),
)


@dataclass(frozen=True)
class Source:
    """Where the HF tensors `names` lie: in `key`, at the indices `lead` of its first dimensions."""

    key: str
    lead: tuple[int, ...]
    names: tuple[str, ...]


def find_sources(directory: Path, stored: Mapping[str, StoredTensor], config: ModelConfig) -> list[Source]:
    """Every HF tensor of the model exactly once, in layer order.

    Raises CorruptCheckpointError naming what is missing, of another shape, or part of no such model.
    """
    tensors = config.tensors()
    problems: list[str] = []
    sources = []
    for keys, names in _wanted(config):
        if any(name not in tensors for name in names):
            continue  # not part of this architecture
        source = _locate(stored, keys, names)
        if source is None:
            problems.append(f"{keys[0][0]} is missing ({', '.join(names)})")
            continue
        sources.append(source)
        expected = (sum(tensors[name][0] for name in names), *tensors[names[0]][1:])
        found = stored[source.key].shape[len(source.lead) :]
        if names[0] in _VOCABULARY and found[:1] > expected[:1]:
            found = (expected[0], *found[1:])  # padded, as tensor parallel learners have it
        if found != expected:
            problems.append(f"{source.key} has shape {list(found)}, expected {list(expected)} ({', '.join(names)})")
    problems += _left_over(stored, sources, config)
    if problems:
        shown = "; ".join(dict.fromkeys(problems[:5])) + (f"; and {len(problems) - 5} more" if problems[5:] else "")
        raise CorruptCheckpointError(
            f"{directory} does not hold the {config.architecture} that its config.json describes: {shown}; "
            "give the checkpoint of this model"
        )
    return sources


def stream_hf_tensors(index: CheckpointIndex, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor of a checkpoint by name, in its stored dtype; at most one of Megatron's tensors in memory."""
    for source in find_sources(index.directory, index.tensors, config):
        yield from _split(index.read(source.key, source.lead), source.names, config)


def stored_dtype(index: CheckpointIndex) -> torch.dtype:
    """The dtype of the model's weights. Raises CorruptCheckpointError when there are several."""
    kinds = {entry.dtype for name, entry in index.tensors.items() if name.startswith(_MODEL_PREFIXES)}
    if len(kinds) != 1:
        raise CorruptCheckpointError(
            f"{index.directory} holds weights of {len(kinds)} dtypes ({', '.join(sorted(map(str, kinds)))}), expected "
            "one; give a checkpoint that this program wrote"
        )
    return kinds.pop()


def _wanted(config: ModelConfig) -> Iterator[tuple[list[tuple[str, tuple[int, ...]]], tuple[str, ...]]]:
    """[(key, lead) of each place where it may be], HF names."""
    yield [("embedding.word_embeddings.weight", ())], (_TOP["embedding.word_embeddings.weight"],)
    num_experts = 0 if config.experts is None else config.experts.count
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for suffixes, names in _LAYER:
            yield _places(suffixes, layer, ()), tuple(prefix + name for name in names)
        for expert in range(num_experts):
            for suffixes, names in _EXPERT:
                yield _places(suffixes, layer, (expert,)), tuple(f"{prefix}mlp.experts.{expert}.{n}" for n in names)
    for key in ("decoder.final_layernorm.weight", "output_layer.weight"):
        yield [(key, ())], (_TOP[key],)


def _places(suffixes: tuple[str, ...], layer: int, expert: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Layers that are all alike are stacked, others are numbered."""
    stacked = [(f"decoder.layers.{suffix}", (layer, *expert)) for suffix in suffixes]
    return stacked + [(f"decoder.layers.{layer}.{suffix}", expert) for suffix in suffixes]


def _locate(
    stored: Mapping[str, StoredTensor], places: list[tuple[str, tuple[int, ...]]], names: tuple[str, ...]
) -> Source | None:
    for key, lead in places:
        if key in stored and all(i < size for i, size in zip(lead, stored[key].shape, strict=False)):
            return Source(key, lead, names)
    return None


def _left_over(stored: Mapping[str, StoredTensor], sources: list[Source], config: ModelConfig) -> list[str]:
    used: dict[str, int] = {}
    for source in sources:
        used[source.key] = max(used.get(source.key, 0), source.lead[0] + 1 if source.lead else 0)
    problems = [f"{key} is not part of it" for key in stored if key.startswith(_MODEL_PREFIXES) and key not in used]
    # Only a stack of layers is long enough to hide a layer too many; numbered layers show up by name.
    return problems + [
        f"{key} stacks {stored[key].shape[0]} layers, expected {config.num_layers}"
        for key, count in used.items()
        if count and not key.split(".")[2].isdigit() and stored[key].shape[0] != config.num_layers
    ]


def _split(tensor: Tensor, names: tuple[str, ...], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    if len(names) == 3:
        # [kv heads × (query heads of each + key + value) × head_dim, …]
        group = config.num_heads // config.num_kv_heads
        heads = tensor.reshape(config.num_kv_heads, group + 2, config.head_dim, *tensor.shape[1:])
        parts = (heads[:, :group], heads[:, group : group + 1], heads[:, group + 1 :])
        yield from zip(names, (part.reshape(-1, *tensor.shape[1:]) for part in parts), strict=True)
    elif len(names) == 2:
        yield from zip(names, tensor.chunk(2), strict=True)
    else:
        yield names[0], tensor[: config.vocab_size] if names[0] in _VOCABULARY else tensor
