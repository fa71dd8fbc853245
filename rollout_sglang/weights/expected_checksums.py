"""Compute SGLang's checksums of its parameters from the tensors that an engine is given.

    HF tensors, as written or sent ─▶ joined and cut as the engine holds them ─▶ in its dtype ─▶ sha256, 16 digits

`POST /weights_checker` of an engine on a CPU hashes the bytes of each parameter (managers/mm_utils.py tensor_hash). It
hashes e4m3 weights with block scales as the bfloat16 values that they stand for (utils/weight_checker.py). A tensor is
hashed when it comes and not kept, unless an earlier part of its parameter is missing.

Only the probe checks two things. One is the rounding to e4m3 by an fp8_tensor engine: its checksum is the checksum of
the weights that it was given. The other is any weight on a GPU, where the engine uses another hash function.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from precision.formats.formats import E4M3, dequantize_block
from precision.formats.rollout_format import STACKS

VOCABULARY_MULTIPLE = 64
"""Engines pad the rows of embedding and head to a multiple of it, with zeros (layers/vocab_parallel_embedding.py)."""
_DIGITS = 16
_SCALE = "_scale_inv"
_HEAD = "lm_head.weight"

_JOINED = {part: (joined, parts) for joined, parts in STACKS.items() for part in parts}
"""HF module → the engine's module and its parts, in the order of their rows."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_SPLIT_BY_COLUMNS = ("o_proj.weight", "down_proj.weight", "experts.w2_weight")
_SPLIT_BY_ROWS = tuple(_JOINED)
_VOCABULARY = ("model.embed_tokens.weight", _HEAD)


@dataclass
class _Parameter:
    """An engine parameter in progress: a running hash for each rank, and parts that wait for an earlier part."""

    parts: tuple[str, ...]
    hashes: list[Any]
    hashed: int = 0
    waiting: dict[str, Tensor] = field(default_factory=dict)


class _Place(NamedTuple):
    parameter: str
    part: str
    parts: tuple[str, ...]


class ExpectedChecksums:
    """The digests of a policy, as an engine of `tensor_parallel` ranks reports them."""

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        num_kv_heads: int,
        num_experts: int = 0,
        tied_embeddings: bool = False,
        tensor_parallel: int = 1,
    ) -> None:
        """`dtype` is the engine's (`--dtype`), to which it casts tensors that are not e4m3."""
        self._dtype = dtype
        self._kv_shards = min(tensor_parallel, num_kv_heads)
        self._ranks = tensor_parallel
        self._num_experts = num_experts
        self._tied = tied_embeddings
        self._parameters: dict[str, _Parameter] = {}
        self._blocks: dict[str, dict[str, Tensor]] = defaultdict(dict)

    def watch(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same stream, observing each tensor."""
        for name, tensor in stream:
            self.observe(name, tensor)
            yield name, tensor

    def observe(self, name: str, tensor: Tensor) -> None:
        """Take one tensor, by its HF name, in the format that the engine gets."""
        if self._tied and name == _HEAD:
            return
        if tensor.dtype is not E4M3 and not name.endswith(_SCALE):
            self._take(name, tensor.detach().to("cpu", self._dtype))
            return
        # e4m3 values and their scales come in succession; together they are one weight.
        weight = name.removesuffix(_SCALE)
        pair = self._blocks[weight]
        pair["scale" if name.endswith(_SCALE) else "values"] = tensor.detach().to("cpu", copy=True)
        if len(pair) == 2:
            del self._blocks[weight]
            self._take(weight, dequantize_block(pair["values"], pair["scale"]).to(torch.bfloat16))

    def digests(self) -> tuple[dict[str, str], ...]:
        """Return for each rank engine parameter → digest. Raises ValueError when a part is missing."""
        missing = sorted(
            f"{name} ({', '.join(one.parts[one.hashed :])})"
            for name, one in self._parameters.items()
            if one.hashed < len(one.parts)
        )
        missing += [f"{name} or its scale" for name in self._blocks]
        if missing:
            raise ValueError(f"{len(missing)} parameters are incomplete, first {missing[0]}; pass the whole policy")
        return tuple(
            {name: one.hashes[rank].hexdigest()[:_DIGITS] for name, one in self._parameters.items()}
            for rank in range(self._ranks)
        )

    def _take(self, name: str, tensor: Tensor) -> None:
        place = _place(name, self._num_experts)
        one = self._parameters.get(place.parameter)
        if one is None:
            hashes = [hashlib.sha256() for _ in range(self._ranks)]
            one = self._parameters[place.parameter] = _Parameter(place.parts, hashes)
        if place.part != one.parts[one.hashed]:
            one.waiting[place.part] = tensor.clone()  # an exporter may reuse the memory
            return
        part: Tensor | None = tensor
        while part is not None:
            projection, shards = one.parts[one.hashed], [part] * self._ranks
            if place.parameter in _VOCABULARY:
                padding = -part.shape[0] % VOCABULARY_MULTIPLE
                padded = torch.cat([part, part.new_zeros(padding, part.shape[1])]) if padding else part
                shards = [*padded.tensor_split(self._ranks)]
            elif self._ranks > 1 and place.parameter.endswith(_SPLIT_BY_COLUMNS):
                shards = [*part.tensor_split(self._ranks, dim=1)]
            elif self._ranks > 1 and projection in ("k_proj", "v_proj"):
                # With more ranks than key-value heads, ranks share a head.
                heads = part.tensor_split(self._kv_shards)
                shards = [heads[rank * self._kv_shards // self._ranks] for rank in range(self._ranks)]
            elif self._ranks > 1 and projection.endswith(_SPLIT_BY_ROWS):
                shards = [*part.tensor_split(self._ranks)]
            for running, shard in zip(one.hashes, shards, strict=True):
                running.update(shard.contiguous().flatten().view(torch.uint8).numpy().data)
            one.hashed += 1
            part = one.waiting.pop(one.parts[one.hashed], None) if one.waiting else None


def _place(name: str, num_experts: int) -> _Place:
    """Return where a HF tensor goes in the engine. The experts' gates and ups are one parameter, the downs another."""
    if match := _EXPERT.fullmatch(name):
        experts, number, projection = match.groups()
        parameter, projections = ("w2_weight", ("down",)) if projection == "down" else ("w13_weight", ("gate", "up"))
        parts = tuple(f"{expert}.{one}_proj" for expert in range(num_experts) for one in projections)
        return _Place(f"{experts}.{parameter}", f"{number}.{projection}_proj", parts)
    module, _, kind = name.rpartition(".")
    before, _, projection = module.rpartition(".")
    if projection not in _JOINED:
        return _Place(name, name, (name,))
    joined, parts = _JOINED[projection]
    return _Place(f"{before}.{joined}.{kind}", projection, parts)
