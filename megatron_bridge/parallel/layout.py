"""Check the parallel layout against the model, and build the process groups.

    ranks = tensor × context × data × pipeline, tensor parallel ranks adjacent, pipeline stages farthest apart;
    experts are spread over the same ranks: expert tensor × expert × expert data = tensor × context × data

Torch and Megatron are loaded only when a process group is joined: `Layout` itself is plain data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.model.megatron_settings import check_owned
from megatron_bridge.model.te_precision import token_multiple
from pipeline.config.recipe import LearnerSection
from pipeline.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel dimensions."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Number of model chunks of each pipeline rank."""
    context: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False
    """Whether norms and the residual stream are split over tensor parallel ranks."""

    @staticmethod
    def of(learner: LearnerSection) -> Layout:
        return Layout(
            tensor=learner.tensor_parallel,
            pipeline=learner.pipeline_parallel,
            virtual=learner.virtual_pipeline,
            context=learner.context_parallel,
            data=learner.data_parallel,
            expert=learner.expert_parallel,
            expert_tensor=learner.expert_tensor_parallel,
            # One tensor parallel rank has nothing to split; Megatron also ignores the key then.
            sequence=learner.sequence_parallel and learner.tensor_parallel > 1,
        )

    @property
    def num_processes(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def sequence_ranks(self) -> int:
        """Number of tensor parallel ranks that split the tokens of a micro-batch."""
        return self.tensor if self.sequence else 1


def set_gpu_environment(learner: LearnerSection, *, weights_shared: bool) -> None:
    """Set what CUDA and torch read of the environment when they are loaded, so call it before; a variable that is set
    stays as it is. `weights_shared`: engines on the same GPU open the learner's memory."""
    if learner.tensor_parallel > 1:
        # One queue for all streams: collectives begin before the products that are to hide them.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    graphs = learner.megatron.transformer.get("cuda_graph_impl", "none") != "none"
    if not (weights_shared or graphs or "PYTORCH_CUDA_ALLOC_CONF" in os.environ):
        # Micro-batches differ in length, so freed blocks of fixed size would lie idle. Another process cannot open
        # memory that grows, and NCCL must not register it for graphs.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def initialize(layout: Layout, seed: int, deadline_s: float) -> None:
    """Join the process group of torchrun's environment and build the parallel groups. The backend is gloo without CUDA,
    else nccl; a collective that takes longer than `deadline_s` ends the process. A process without torchrun's variables
    is a world of one. Raises LayoutError if the world's size is not the layout's."""
    from datetime import timedelta

    import torch
    from megatron.core import parallel_state, tensor_parallel

    from megatron_bridge.parallel import cpu_backend

    on_cpu = cpu_backend.install()
    if not on_cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not torch.distributed.is_initialized():
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world != layout.num_processes:
            raise LayoutError(
                f"started with {world} processes, but tensor {layout.tensor} × context {layout.context} × pipeline "
                f"{layout.pipeline} × data {layout.data} needs {layout.num_processes}; start that many "
                "(torchrun --nproc-per-node)"
            )
        # Without `device_id`: torch would split each group from the world's communicator, which all ranks must do
        # together, but members of Megatron's gloo groups never do.
        backend, timeout = "gloo" if on_cpu else "nccl", timedelta(seconds=deadline_s)
        if "RANK" in os.environ:
            torch.distributed.init_process_group(backend, timeout=timeout)
        else:
            store = torch.distributed.HashStore()  # type: ignore[attr-defined]
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=deadline_s / 60,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def leave_layout() -> None:
    """Leave the parallel groups but not the world, so that `initialize` can build other groups. Collective."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    groups = dict[int, Any]()
    for held in list(vars(parallel_state).values()):
        for value in held if isinstance(held, list) else [held]:
            if isinstance(value, dist.ProcessGroup) and value is not dist.GroupMember.WORLD:
                groups[id(value)] = value
    if groups:
        dist.barrier()  # a group must not end while another rank still waits in it
    for group in groups.values():  # Megatron forgets most groups, but torch keeps them, with two threads each
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def check_layout(hf_config: Mapping[str, Any], learner: LearnerSection) -> None:
    """Raise LayoutError if sizes do not divide the model, ModelError if it is not supported, RecipeError for a setting
    of Megatron that the program owns. Loads no torch."""
    check_owned(learner)
    config, layout = ModelConfig.from_hf(hf_config), Layout.of(learner)
    divided = {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
    }
    if config.experts is None:
        divided["intermediate_size"] = config.ffn_size
    for name, size in divided.items():
        if size % layout.tensor:
            raise LayoutError(
                f"learner.tensor_parallel is {layout.tensor}, which does not divide the model's {name} {size}; "
                f"use one of {_divisors_of_all(list(divided.values()))}"
            )
    if layout.virtual > 1 and layout.pipeline == 1:
        raise LayoutError(
            f"learner.virtual_pipeline is {layout.virtual}, but learner.pipeline_parallel is 1: there are no stages to "
            "interleave; set virtual_pipeline to 1, or raise pipeline_parallel"
        )
    layers_of_chunks(config.num_layers, learner)
    experts, spread = config.experts, layout.expert * layout.expert_tensor
    if experts is None:
        if spread > 1:
            raise LayoutError(
                f"learner.expert_parallel × expert_tensor_parallel is {spread}, but {config.architecture} has no "
                "experts; set both to 1"
            )
        return
    if experts.count % layout.expert:
        raise LayoutError(
            f"learner.expert_parallel is {layout.expert}, which does not divide the model's num_experts "
            f"{experts.count}; use one of {_divisors_of_all([experts.count])}"
        )
    if experts.ffn_size % layout.expert_tensor:
        raise LayoutError(
            f"learner.expert_tensor_parallel is {layout.expert_tensor}, which does not divide the model's "
            f"moe_intermediate_size {experts.ffn_size}; use one of {_divisors_of_all([experts.ffn_size])}"
        )
    ranks = layout.tensor * layout.context * layout.data
    if ranks % spread:
        raise LayoutError(
            f"learner.expert_parallel × expert_tensor_parallel is {spread}, which does not divide the {ranks} ranks of "
            "a pipeline stage (tensor × context × data); lower it, or raise learner.data_parallel"
        )
    if layout.tensor > 1 and not layout.sequence:
        raise LayoutError(
            f"learner.tensor_parallel is {layout.tensor} with experts, which needs learner.sequence_parallel: without "
            "it every tensor parallel rank would route every token; set it to true"
        )


def layers_of_chunks(num_layers: int, learner: LearnerSection) -> list[list[int]]:
    """Return stage → model chunk → number of layers, by Megatron-Core's rules for even stages, for a first or last one
    of another size, and for stages in which embedding and head count as a layer each. Raises LayoutError."""
    layout, given = Layout.of(learner), learner.megatron.transformer
    first, last = (given.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last"))
    ends = [given.get(f"account_for_{end}_in_pipeline_split", False) for end in ("embedding", "loss")]
    chosen = [
        f"{name} {value}" for name, value in given.items() if name.endswith(("_pipeline_stage", "_pipeline_split"))
    ]
    key = "learner.pipeline_parallel" + (" × learner.virtual_pipeline" if layout.virtual > 1 else "")
    given_too = f", with {', '.join(chosen)}" if chosen else ""
    refused = LayoutError(
        f"{key} is {layout.pipeline * layout.virtual}{given_too}, which does not divide the model's num_hidden_layers "
        f"{num_layers}; use one of {_divisors_of_all([num_layers])}, or stages of different sizes by "
        "learner.megatron.transformer (docs/model.md)"
    )
    sized = [size for size in (first, last) if size is not None]
    if not all(isinstance(one, int) for one in (*sized, *ends)) or (sized and layout.pipeline == 1):
        raise refused
    middle, left = layout.pipeline - len(sized), num_layers + sum(ends) - sum(sized)
    if (sized and any(ends)) or middle < 0 or left < middle or left % max(1, middle) or (left and not middle):
        raise refused
    stages = [left // max(1, middle)] * middle
    stages = [*sized[: first is not None], *stages, *sized[first is not None :]]
    if any(stage < layout.virtual or stage % layout.virtual for stage in stages):
        raise refused
    found = [[stage // layout.virtual] * layout.virtual for stage in stages]
    found[0][0] -= ends[0]
    found[-1][-1] -= ends[1]
    return found


def check_longest_sample(learner: LearnerSection, context_tokens: int) -> None:
    """Raise LayoutError if a sample of `context_tokens`, padded as the layout needs, exceeds a micro-batch."""
    layout = Layout.of(learner)
    rows = 2 * layout.context if layout.context > 1 else 1
    multiple = math.lcm(rows, layout.context * token_multiple(learner.precision)) * layout.sequence_ranks
    padded = -(-(context_tokens - 1) // multiple) * multiple
    if padded > learner.micro_batch_tokens:
        raise LayoutError(
            f"learner.micro_batch_tokens is {learner.micro_batch_tokens}, but the longest sample "
            f"(rollout.context_tokens {context_tokens}) takes {padded} when it is padded to a multiple of {multiple} "
            "for context and sequence parallelism and FP8; raise micro_batch_tokens"
        )


def _divisors_of_all(sizes: list[int]) -> str:
    return ", ".join(str(n) for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes))
