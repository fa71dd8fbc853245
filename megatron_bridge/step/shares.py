"""How the samples of a batch are divided over the ranks of this process's layout, and what these give one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray

from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.model.te_precision import token_multiple
from megatron_bridge.parallel.layout import Layout
from megatron_bridge.step.micro_batches import Split
from pipeline.config.recipe import LearnerSection

_INTEGERS: dict[int, Any] = {1: np.uint8, 4: np.int32}
"""What values of so many bytes are added as: with zeros, that changes no bit."""


def split_of(section: LearnerSection, layout: Layout, model_config: ModelConfig) -> Split:
    """What a plan asks of this rank's place in the parallel state."""
    return Split(
        data_ranks=parallel_state.get_data_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        context_ranks=parallel_state.get_context_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        sequence_ranks=layout.sequence_ranks,
        token_multiple=token_multiple(section.precision),
        count_multiple=layout.micro_batch_multiple,
        attention_parity=model_config.attention_parity,
    )


def sum_of_shares(values: NDArray[Any], device: torch.device) -> NDArray[Any]:
    """`values`, on the host, of which each place is 0 on all data parallel ranks but one: what that one has, bit for
    bit. It takes the place of `values` in memory where `device` is the host. Collective."""
    summed = torch.from_numpy(values.view(_INTEGERS[values.dtype.itemsize])).to(device)
    dist.all_reduce(summed, group=parallel_state.get_data_parallel_group())
    return np.asarray(summed.cpu().numpy()).view(values.dtype)


def sum_over_copies(values: torch.Tensor) -> None:
    """In place, over the ranks that work on the same samples: all of a data parallel rank. Collective."""
    for group in (parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()):
        dist.all_reduce(values, group=group)
