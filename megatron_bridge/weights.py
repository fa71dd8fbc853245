"""HF safetensors ⇄ Megatron-Core parameters, through mbridge's weight conversion (its model builder is not used)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mbridge.core.llm_bridge import LLMBridge
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_bridge.shape import ModelShape
from pipeline.errors import ModelError

_INPUT_NORM = ["model.layers.{layer_number}.input_layernorm.weight"]
_MLP_NORM = ["model.layers.{layer_number}.post_attention_layernorm.weight"]
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class _DenseBridge(LLMBridge):  # type: ignore[misc]
    """mbridge's conversion for dense decoders, with the layer norms of Megatron's own (non-TE) layers added.

    TE fuses the norms into the linear that follows, so their parameters carry other names there; both are mapped.
    """

    _OTHER_MAPPING = {"input_layernorm.weight": _INPUT_NORM}  # noqa: RUF012 (mbridge's own convention)
    _MLP_MAPPING = {**LLMBridge._MLP_MAPPING, "pre_mlp_layernorm.weight": _MLP_NORM}  # noqa: RUF012

    def __init__(self, shape: ModelShape, config: Any) -> None:
        self._config = config
        self.memory: Mapping[str, Tensor] | None = None
        fields = SimpleNamespace(
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            tie_word_embeddings=shape.tied_embeddings,
        )
        super().__init__(fields, dtype=config.params_dtype)
        self.vocab_size = self.padded_vocab_size = shape.vocab_size

    def _build_config(self) -> Any:
        return self._config

    def _adjust_mapping_for_shared_weights(self) -> None:
        # A copy: the mapping is shared by every bridge of the process, tied or not.
        self._DIRECT_MAPPING = dict(LLMBridge._DIRECT_MAPPING)
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"

    def _get_safetensor_io(self, weights_path: str) -> Any:
        return super()._get_safetensor_io(weights_path) if self.memory is None else self

    def load_some_hf_weight(self, names: list[str]) -> dict[str, Tensor]:
        """What mbridge asks of its file reader, answered from memory."""
        assert self.memory is not None
        return {name: self.memory[name] for name in names}

    def _get_actual_hf_path(self, weight_path: str) -> str:
        return weight_path


def load_hf(chunks: Sequence[Any], shape: ModelShape, folder: Path) -> None:
    """Copy the weights of an HF folder into the model chunks of this rank. Collective over tensor parallel ranks.

    Raises ModelError naming every tensor that is missing, unexpected or of another shape, before anything is copied.
    """
    check_weights(folder, shape)
    with torch.no_grad():
        _DenseBridge(shape, chunks[0].config).load_weights(list(chunks), str(folder))


def load_named(chunks: Sequence[Any], shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
    """Copy whole HF tensors, by name, into the model chunks of this rank. Collective over tensor parallel ranks."""
    bridge = _DenseBridge(shape, chunks[0].config)
    bridge.memory = tensors
    with torch.no_grad():
        bridge.load_weights(list(chunks), "")


def export_hf(chunks: Sequence[Any], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor of the whole model, by name, in the model's dtype. Collective: every rank must exhaust it.

    Wrapped chunks (DDP) are welcome. The tensors may share memory with the parameters: copy what is kept.
    """
    bare = [chunk.module if hasattr(chunk, "module") else chunk for chunk in chunks]
    seen: set[str] = set()
    with torch.no_grad():
        for name, tensor in _DenseBridge(shape, bare[0].config).export_weights(bare):
            if name not in seen:  # tied embeddings live on the first and on the last pipeline stage
                seen.add(name)
                yield name, tensor.detach()


def check_weights(folder: Path, shape: ModelShape) -> None:
    """Compare the headers of a folder's safetensors with what the model needs. Raises ModelError."""
    found = tensor_headers(folder)
    expected = shape.tensors()
    problems = [f"{name} is missing" for name in expected if name not in found]
    for name, (size, dtype) in found.items():
        if name not in expected:
            if not _may_be_ignored(name, shape):
                problems.append(f"{name} is not part of {shape.architecture}")
        elif size != expected[name]:
            problems.append(f"{name} has shape {list(size)}, expected {list(expected[name])}")
        elif dtype not in _FLOATS:
            problems.append(f"{name} is {dtype}, expected one of {', '.join(sorted(_FLOATS))}")
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ModelError(f"{folder} does not hold the weights that its config.json describes: {shown}")


def tensor_headers(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """name → (shape, safetensors dtype) of every tensor in a folder, from the headers only. Raises ModelError."""
    headers: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    view = file.get_slice(name)
                    headers[name] = (tuple(view.get_shape()), view.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} is not a readable safetensors file ({error}); fetch the model again") from error
    return headers


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those that its index names, or all. Raises ModelError."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} is damaged ({error}); fetch the model again") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing)}, which its index names; fetch the model again")
    return [folder / name for name in names]


def _may_be_ignored(name: str, shape: ModelShape) -> bool:
    """Old checkpoints store rotary frequencies; tied ones sometimes store the embedding twice."""
    return name.endswith("rotary_emb.inv_freq") or (shape.tied_embeddings and name == "lm_head.weight")
