"""Builds the model of every rank of a learner on the meta device, one rank after another in one process.

Prints, for each case of stdin ([[HF config, layout], …]), a JSON list with what each rank holds.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

warnings.filterwarnings("ignore")

from megatron.core import parallel_state, tensor_parallel  # noqa: E402

from megatron_bridge.hf.model_config import ModelConfig  # noqa: E402
from megatron_bridge.model.build import build_chunks  # noqa: E402
from megatron_bridge.parallel import cpu_backend  # noqa: E402
from megatron_bridge.parallel.layout import Layout, leave_layout  # noqa: E402
from tests.support.name_bijection import RankParameters  # noqa: E402


def ranks(config: ModelConfig, layout: Layout) -> Iterator[dict[str, Any]]:
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
        yield asdict(RankParameters.here(chunks, config))
        leave_layout()
        dist.destroy_process_group()


if __name__ == "__main__":
    cpu_backend.install()
    # There is nothing to fill, and on the meta device filling takes most of the time.
    torch.nn.init.normal_ = lambda tensor, *_, **__: tensor
    for config, sizes in json.load(sys.stdin):
        print(json.dumps(list(ranks(ModelConfig.from_hf(config), Layout(**sizes)))), flush=True)
