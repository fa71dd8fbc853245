"""Records what models built from Transformer Engine layers hold, for tests on machines without it.

    python ops/gpu/te_parameter_names.py tests/golden/te_parameter_names.json

For each model and tensor parallel size: `ranks`, names and shapes of each rank's parameters; `extra`, other entries
of a state dict; `stored`, names and shapes of the tensors that a distributed checkpoint would hold. Run it again with
a new version of Megatron-Core or Transformer Engine, and commit the difference. Models are built and never run: where
there is no GPU, it is enough to fake `torch.cuda` until Transformer Engine is imported and its constructors are
content.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.model.build import build_chunks
from megatron_bridge.parallel.layout import Layout, leave_layout

SIZES: dict[str, Any] = dict(
    num_hidden_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    vocab_size=64,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
)
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": SIZES | dict(architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False),
    "Qwen3 tied": SIZES | dict(architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True),
    "Qwen2": SIZES | dict(architectures=["Qwen2ForCausalLM"], tie_word_embeddings=False),
    "Qwen3-MoE": SIZES
    | dict(
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        tie_word_embeddings=False,
    ),
}


def record() -> dict[str, Any]:
    """Everything that goes into the file."""
    cases = []
    for name, config in MODELS.items():
        for size in (1, 2):
            layout = Layout(tensor=size, sequence=size > 1, expert=size if "MoE" in name else 1)
            held = [_rank(ModelConfig.from_hf(config), layout, rank) for rank in range(size)]
            ranks = [one.pop("parameters") for one in held]
            cases.append(dict(model=name, config=config, tensor=size, ranks=ranks, **held[0]))
    versions = {name: version(name) for name in ("megatron-core", "transformer-engine")}
    return dict(versions=versions, cases=cases)


def _rank(shape: ModelConfig, layout: Layout, rank: int) -> dict[str, Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.tensor)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    (model,) = build_chunks(shape, layout, torch.bfloat16, 1.0, layers="transformer_engine")
    parameters = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    sharded = model.sharded_state_dict()
    apply_factories(sharded)  # gate and up are stored apart
    stored = {
        entry.key: list(entry.global_shape) for entry in nested_values(sharded) if isinstance(entry, ShardedTensor)
    }
    extra = sorted(name for name in model.state_dict() if name not in parameters)
    leave_layout()
    dist.destroy_process_group()
    return dict(parameters=parameters, extra=extra, stored=stored)


if __name__ == "__main__":
    text = json.dumps(record(), indent=1)
    Path(sys.argv[1]).write_text(
        re.sub(r"\[[\d,\s]+\]", lambda shape: "".join(shape[0].split()), text) + "\n", encoding="utf-8"
    )
