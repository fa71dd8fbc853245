"""The parallel layout: what divides what, and the process groups.

    ranks = tensor × data × pipeline, tensor parallel ranks adjacent, pipeline stages farthest apart

`check_layout` reads plain data only, so that a recipe can be refused before torch or Megatron are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_bridge.shape import ModelShape
from pipeline.errors import LayoutError
from pipeline.recipe import LearnerSection


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel dimensions."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @staticmethod
    def of(learner: LearnerSection) -> Layout:
        """The layout that a recipe asks for."""
        return Layout(tensor=learner.tensor_parallel, pipeline=learner.pipeline_parallel, data=learner.data_parallel)

    @property
    def num_processes(self) -> int:
        return self.tensor * self.pipeline * self.data


def check_layout(hf_config: Mapping[str, Any], learner: LearnerSection) -> None:
    """Raise LayoutError when the sizes do not divide the model, ModelError when the model is not supported.

    Loads neither torch nor Megatron.
    """
    shape = ModelShape.from_hf(hf_config)
    tensor, stages = learner.tensor_parallel, learner.pipeline_parallel
    divided = {
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.ffn_size,
        "vocab_size": shape.vocab_size,
    }
    for name, size in divided.items():
        if size % tensor:
            raise LayoutError(
                f"learner.tensor_parallel is {tensor}, which does not divide the model's {name} {size}; "
                f"use one of {_divisors_of_all(list(divided.values()))}"
            )
    if shape.num_layers % stages:
        raise LayoutError(
            f"learner.pipeline_parallel is {stages}, which does not divide the model's num_hidden_layers "
            f"{shape.num_layers}; use one of {_divisors_of_all([shape.num_layers])}"
        )


def _divisors_of_all(sizes: list[int]) -> str:
    return ", ".join(str(n) for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes))


def initialise(layout: Layout, seed: int, deadline_s: float) -> None:
    """Join the process group that torchrun's environment describes and build the parallel groups.

    gloo without CUDA, nccl with it; every collective ends the process after `deadline_s`. A process started without
    torchrun's variables is a world of one. Raises LayoutError when the world has another size than the layout.
    """
    from datetime import timedelta

    import torch
    from megatron.core import parallel_state, tensor_parallel

    from megatron_bridge import cpu

    on_cpu = cpu.install()
    if not torch.distributed.is_initialized():
        _join_world(layout, "gloo" if on_cpu else "nccl", timedelta(seconds=deadline_s))
    if not on_cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        distributed_timeout_minutes=deadline_s / 60,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _join_world(layout: Layout, backend: str, timeout: Any) -> None:
    import torch

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != layout.num_processes:
        raise LayoutError(
            f"started with {world} processes, but tensor {layout.tensor} × pipeline {layout.pipeline} × data "
            f"{layout.data} needs {layout.num_processes}; start that many (torchrun --nproc-per-node)"
        )
    if "RANK" in os.environ:
        torch.distributed.init_process_group(backend, timeout=timeout)
    else:
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def shut_down() -> None:
    """Leave the parallel groups and the process group."""
    import torch
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
