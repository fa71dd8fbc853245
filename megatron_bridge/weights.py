"""HF safetensors ⇄ Megatron-Core parameters, through mbridge's weight conversion (its model builder is not used)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mbridge.core.llm_bridge import LLMBridge
from torch import Tensor

from megatron_bridge.hf_folder import check_weights
from megatron_bridge.shape import ModelShape

_INPUT_NORM = ["model.layers.{layer_number}.input_layernorm.weight"]
_MLP_NORM = ["model.layers.{layer_number}.post_attention_layernorm.weight"]


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
