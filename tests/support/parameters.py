"""Checks that a name map is a bijection: all ranks together hold every number of every Hugging Face tensor once.

Works on names and shapes alone, so that a model of any size is checked without its memory: `build` makes the model of
every rank of a learner on the meta device, one rank after another in one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.model.build import build_chunks
from megatron_bridge.parallel import cpu_backend
from megatron_bridge.parallel.layout import Layout, leave_layout
from megatron_bridge.weights import OUTPUT_LAYER, NameMap, ShardCoords, TensorSlice, parameter_names
from pipeline.errors import ModelError

_COPY = " (copy of the last stage)"


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """What one rank of the learner holds."""

    stage: int
    """Pipeline rank."""
    coords: ShardCoords
    sizes: Mapping[str, tuple[int, ...]]
    """Stage name → shape, in the order of `named_parameters()` over the rank's chunks."""

    @staticmethod
    def here(chunks: Iterable[Any], config: ModelConfig) -> RankParameters:
        """This process, by Megatron's parallel state. The chunks may be on the meta device."""
        return RankParameters(
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            coords=ShardCoords.here(),
            sizes={name: tuple(parameter.shape) for name, parameter in parameter_names(chunks, NameMap(config))},
        )


def check_bijection(config: ModelConfig, ranks: Iterable[RankParameters]) -> int:
    """Check that the ranks of a whole learner hold every number of every Hugging Face tensor exactly once.

    Ranks that hold the same rectangle (replicas) count once, if every rectangle of a tensor has equally many of them.
    The output layer of a tied model must be a second exact copy of the embedding. Returns the count of numbers, a
    tied embedding once. Raises ModelError naming the parameter or tensor that breaks it.
    """
    names = NameMap(config)
    holders: dict[str, Counter[TensorSlice]] = {}
    owner: dict[str, tuple[int, str]] = {}
    stages: dict[int, list[str]] = {}
    for rank in ranks:
        listed = list(rank.sizes)
        if stages.setdefault(rank.stage, listed) != listed:
            raise ModelError(
                f"pipeline stage {rank.stage}: ranks list their parameters differently, first at "
                f"{_first_difference(stages[rank.stage], listed)}; expected one order on all ranks of a stage"
            )
        for name, size in rank.sizes.items():
            _require_size(name, size, names.size(name, rank.coords), rank)
            for tensor_slice in names.slices(name, rank.coords):
                if not tensor_slice.size[0]:  # a rank whose rows only pad a vocabulary
                    continue
                copy = (
                    tensor_slice.name + _COPY if config.tied_embeddings and name == OUTPUT_LAYER else tensor_slice.name
                )
                holders.setdefault(copy, Counter())[tensor_slice] += 1
                _require_owner(copy, (rank.stage, name), owner, names.is_expert(name))
    missing = [name for name in names.tensors if name not in holders]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(names.tensors)} tensors of {config.architecture} are held by no rank, the first "
            f"{missing[0]}; expected each on one pipeline stage"
        )
    for name, slices in holders.items():
        _require_tiling(name, slices, names.tensors[name.removesuffix(_COPY)])
    return config.num_parameters


def _require_size(name: str, size: tuple[int, ...], expected: tuple[int, ...], rank: RankParameters) -> None:
    if tuple(size) != expected:
        raise ModelError(
            f"pipeline stage {rank.stage}, tensor rank {rank.coords.tensor_rank}: {name} has shape {list(size)}, but "
            f"its Hugging Face tensors make {list(expected)}; a name is wrong, or the model is of another shape"
        )


def _require_owner(tensor: str, mine: tuple[int, str], owner: dict[str, tuple[int, str]], expert: bool) -> None:
    """Experts of one tensor may go by another local number on another rank, but never on another stage."""
    first = owner.setdefault(tensor, mine)
    if first != mine and not (expert and first[0] == mine[0]):
        raise ModelError(
            f"{tensor} is held twice: by {first[1]} on pipeline stage {first[0]} and by {mine[1]} on stage {mine[0]}; "
            "expected one parameter for each tensor"
        )


def _require_tiling(name: str, slices: Counter[TensorSlice], size: tuple[int, ...]) -> None:
    """Distinct rectangles lie within the tensor, do not overlap, have its area in sum, and equally many holders."""
    rectangles = [(*tensor_slice.rows, *(tensor_slice.columns or (0, 1))) for tensor_slice in slices]
    rows, columns = size[0], size[1] if len(size) > 1 else 1
    inside = all(0 <= r0 < r1 <= rows and 0 <= c0 < c1 <= columns for r0, r1, c0, c1 in rectangles)
    area = sum((r1 - r0) * (c1 - c0) for r0, r1, c0, c1 in rectangles)
    if not inside or area != rows * columns or _overlap(rectangles):
        raise ModelError(
            f"{name} {list(size)} is covered by {area} numbers in {len(rectangles)} slices with gaps or overlaps; "
            f"expected each of its {rows * columns} numbers exactly once"
        )
    if len(set(slices.values())) > 1:
        raise ModelError(
            f"slices of {name} are held by {sorted(set(slices.values()))} ranks; expected equally many of each"
        )


def _overlap(rectangles: Sequence[tuple[int, int, int, int]]) -> bool:
    ordered = sorted(rectangles)
    for coords, (_, bottom, left, right) in enumerate(ordered):
        for top, _, other_left, other_right in ordered[coords + 1 :]:
            if top >= bottom:
                break
            if left < other_right and other_left < right:
                return True
    return False


def _first_difference(left: Sequence[str], right: Sequence[str]) -> str:
    for ours, theirs in zip(left, right, strict=False):
        if ours != theirs:
            return f"{ours} against {theirs}"
    return f"parameter {min(len(left), len(right))}, where one list ends"


def ranks(config: ModelConfig, layout: Layout, settings: Mapping[str, Any]) -> Iterator[RankParameters]:
    for rank in range(layout.num_processes):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.num_processes)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        with torch.device("meta"):
            chunks = build_chunks(config, layout, torch.bfloat16, 1.0, settings=settings)
        yield RankParameters.here(chunks, config)
        leave_layout()
        dist.destroy_process_group()


def build(cases: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[list[RankParameters]]:
    """What each rank holds, for each HF config and sizes of a layout, with `settings` those of
    learner.megatron.transformer. Run it in a process of its own: run_ranks(1, …).

    It leaves the gloo world for worlds that pretend.
    """
    dist.destroy_process_group()
    cpu_backend.install()
    # There is nothing to fill, and on the meta device filling takes most of the time.
    torch.nn.init.normal_ = lambda tensor, *_, **__: tensor
    found = []
    for hf_config, given in cases:
        sizes = dict(given)
        settings = sizes.pop("settings", {})
        found.append(list(ranks(ModelConfig.from_hf(hf_config), Layout(**sizes), settings)))
    return found
