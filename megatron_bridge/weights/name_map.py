"""Which slices of which Hugging Face tensors every Megatron-Core parameter holds, on every rank.

Loading copies the slices in; exporting lays them side by side. All ranks together hold every number of every
tensor, none twice. Names are mbridge's; the geometry is written here, because mbridge has it inside collectives.

A parameter is the stack, along rows, of its slices. Rank r of n tensor parallel ranks holds
    linear_qkv              q, k and v rows of each of its key/value groups, group after group
    linear_fc1              its rows of gate, then its rows of up
    linear_fc2, linear_proj its columns
    embedding, output layer its rows, and below them those that pad the vocabulary (ModelConfig.vocabulary_rows)
and all else whole. Experts are cut by the expert tensor parallel ranks instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from mbridge.core.llm_bridge import LLMBridge
from mbridge.core.parallel_states import ParallelStates
from mbridge.models.qwen2moe import Qwen2MoEBridge
from megatron.core import parallel_state

from megatron_bridge.hf.model_config import ModelConfig
from pipeline.errors import ModelError
from precision.formats.stacks import qkv_rows

_INPUT_NORM = ["model.layers.{layer_number}.input_layernorm.weight"]
_MLP_NORM = ["model.layers.{layer_number}.post_attention_layernorm.weight"]

_GROUPED_EXPERT = re.compile(r"(.*\.mlp\.experts\.linear_fc[12]\.weight)(\d+)")
_SINGLE_EXPERT = re.compile(r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12]\.weight)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")

OUTPUT_LAYER = "output_layer.weight"


class _Names(Qwen2MoEBridge):  # type: ignore[misc]
    """mbridge's names for dense and MoE decoders, with the layer norms of Megatron's own (non-TE) layers added.

    TE fuses the norms into the linear that follows, so their parameters carry other names there; both are mapped.
    """

    _OTHER_MAPPING = {"input_layernorm.weight": _INPUT_NORM}  # noqa: RUF012 (mbridge's own convention)
    _MLP_MAPPING = {  # noqa: RUF012
        **LLMBridge._MLP_MAPPING,
        **Qwen2MoEBridge._MLP_MAPPING,
        "pre_mlp_layernorm.weight": _MLP_NORM,
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(SimpleNamespace(tied=config.tied_embeddings), parallel_states=ParallelStates())

    def _build_config(self) -> Any:
        return None

    def _adjust_mapping_for_shared_weights(self) -> None:
        # A copy: the mapping is shared by every bridge of the process, tied or not.
        self._DIRECT_MAPPING = dict(LLMBridge._DIRECT_MAPPING)
        if self.hf_config.tied:
            self._DIRECT_MAPPING[OUTPUT_LAYER] = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class ShardCoords:
    """A rank's position in, and the size of, each group that splits parameters: what decides which slices it holds."""

    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor_rank: int = 0
    expert_tensor_size: int = 1

    @staticmethod
    def here() -> ShardCoords:
        """This process, by Megatron's parallel state."""
        return ShardCoords(
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
            expert_rank=parallel_state.get_expert_model_parallel_rank(),
            expert_size=parallel_state.get_expert_model_parallel_world_size(),
            expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
            expert_tensor_size=parallel_state.get_expert_tensor_parallel_world_size(),
        )


@dataclass(frozen=True)
class TensorSlice:
    """Part of a Hugging Face tensor: rows [start, stop) × columns [start, stop); `columns` is None for a vector."""

    name: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None

    @property
    def size(self) -> tuple[int, ...]:
        """Shape of the slice: (rows,) or (rows, columns)."""
        rows = self.rows[1] - self.rows[0]
        return (rows,) if self.columns is None else (rows, self.columns[1] - self.columns[0])

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of the slice in the whole tensor."""
        return (slice(*self.rows),) if self.columns is None else (slice(*self.rows), slice(*self.columns))


class NameMap:
    """Megatron parameters ⇄ Hugging Face tensors of one model.

    Parameters go by their *stage name*, which is the same on every rank of a pipeline stage: Megatron's own with the
    layer counted over the whole model, the expert counted from the rank's first, and experts named as TE's grouped
    linears are, `decoder.layers.7.mlp.experts.linear_fc1.weight3`.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.tensors = config.tensors()
        self._names = _Names(config)

    def stage_name(self, parameter: str, layers: Sequence[int]) -> str:
        """The stage name of `named_parameters()`' name in a chunk that holds these `layers`, counted from 0."""
        single = _SINGLE_EXPERT.fullmatch(parameter)
        if single:
            parameter = f"{single[1]}.{single[3]}{single[2]}"
        return _LAYER.sub(lambda found: f"decoder.layers.{layers[int(found[1])]}.", parameter, count=1)

    def is_expert(self, stage_name: str) -> bool:
        """Whether the parameter belongs to one expert, so that expert parallel ranks hold others."""
        return _GROUPED_EXPERT.fullmatch(stage_name) is not None

    def slices(self, stage_name: str, coords: ShardCoords) -> tuple[TensorSlice, ...]:
        """The slices that the rank at `coords` holds under this name, in the order of their rows.

        Raises ModelError for a parameter that has no Hugging Face counterpart in this model.
        """
        names = self._hf_names(self._whole_model_name(stage_name, coords))
        rank, size = coords.tensor_rank, coords.tensor_size
        if self.is_expert(stage_name):
            rank, size = coords.expert_tensor_rank, coords.expert_tensor_size
        if ".linear_qkv." in stage_name and "layer_norm" not in stage_name:
            return tuple(self._qkv(names, rank, size))
        if stage_name.startswith(("embedding.", "output_layer.")):
            rows = self.size(stage_name, coords)[0]
            start, stop = (min(at, self.config.vocab_size) for at in (rank * rows, (rank + 1) * rows))
            return tuple(TensorSlice(name, (start, stop), self._columns(name)) for name in names)
        if ".linear_fc1.weight" in stage_name:
            return tuple(self._slice(name, rank, size, axis=0) for name in names)
        if ".linear_fc2.weight" in stage_name or stage_name.endswith(".linear_proj.weight"):
            return tuple(self._slice(name, rank, size, axis=1) for name in names)
        return tuple(self._slice(name, 0, 1, axis=0) for name in names)

    def size(self, stage_name: str, coords: ShardCoords) -> tuple[int, ...]:
        """Shape of the parameter at `coords`. Those of the vocabulary may have more rows than their slice."""
        if stage_name.startswith(("embedding.", "output_layer.")):
            return self.config.vocabulary_rows(coords.tensor_size) // coords.tensor_size, self.config.hidden_size
        slices = self.slices(stage_name, coords)
        return (sum(tensor_slice.size[0] for tensor_slice in slices), *slices[0].size[1:])

    def _whole_model_name(self, stage_name: str, coords: ShardCoords) -> str:
        expert = _GROUPED_EXPERT.fullmatch(stage_name)
        if expert is None or self.config.experts is None:
            return stage_name
        first = self.config.experts.count // coords.expert_size * coords.expert_rank
        return f"{expert[1]}{first + int(expert[2])}"

    def _hf_names(self, name: str) -> list[str]:
        try:
            names: list[str] = self._names._weight_name_mapping_mcore_to_hf(name)
        except (NotImplementedError, IndexError):  # IndexError: outside the decoder's layers
            names = []
        if not names or any(hf_name not in self.tensors for hf_name in names):
            raise ModelError(
                f"Megatron parameter {name} has no counterpart among the Hugging Face tensors of "
                f"{self.config.architecture} ({names or 'unknown name'}); expected one for each; build the model from "
                "the same config.json"
            )
        return names

    def _slice(self, name: str, rank: int, size: int, *, axis: int) -> TensorSlice:
        """Share `rank` of `size` equal shares along one axis."""
        spans = [(0, length) for length in self.tensors[name]]
        share = spans[axis][1] // size
        spans[axis] = (rank * share, (rank + 1) * share)
        return TensorSlice(name, spans[0], spans[1] if len(spans) > 1 else None)

    def _qkv(self, names: Sequence[str], rank: int, size: int) -> Iterator[TensorSlice]:
        groups = self.config.num_kv_heads // size
        heads = self.config.num_heads // self.config.num_kv_heads
        rows = qkv_rows(heads, 1, self.config.head_dim)
        for group in range(rank * groups, (rank + 1) * groups):
            for name, count in zip(names, rows, strict=True):
                yield TensorSlice(name, (group * count, (group + 1) * count), self._columns(name))

    def _columns(self, name: str) -> tuple[int, int] | None:
        size = self.tensors[name]
        return (0, size[1]) if len(size) > 1 else None


def parameter_names(chunks: Iterable[Any], names: NameMap) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(stage name, parameter) of every parameter of a rank's model chunks, wrapped or not, in their order."""
    for chunk in chunks:
        while hasattr(chunk, "module"):  # DDP
            chunk = chunk.module
        layers = layers_of(chunk)
        for name, parameter in chunk.named_parameters():
            yield names.stage_name(name, layers), parameter


def layers_of(chunk: Any) -> list[int]:
    """The decoder layers of an unwrapped model chunk, counted from 0 over the whole model."""
    return [layer.layer_number - 1 for layer in chunk.decoder.layers]
