"""The model of every rank of a learner on the meta device, one rank after another in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.model.build import build_chunks
from megatron_bridge.parallel import cpu_backend
from megatron_bridge.parallel.layout import Layout, leave_layout
from tests.support.name_bijection import RankParameters


def ranks(config: ModelConfig, layout: Layout) -> Iterator[RankParameters]:
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
            chunks = build_chunks(config, layout, torch.bfloat16, 1.0)
        yield RankParameters.here(chunks, config)
        leave_layout()
        dist.destroy_process_group()


def build(cases: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[list[RankParameters]]:
    """What each rank holds, for each HF config and sizes of a layout. Run it in a process of its own: run_ranks(1, …).

    It leaves the gloo world for worlds that pretend.
    """
    dist.destroy_process_group()
    cpu_backend.install()
    # There is nothing to fill, and on the meta device filling takes most of the time.
    torch.nn.init.normal_ = lambda tensor, *_, **__: tensor
    return [list(ranks(ModelConfig.from_hf(hf_config), Layout(**sizes))) for hf_config, sizes in cases]
