"""AdamW over Megatron's buffers, and one guarded step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from pipeline.config.recipe import LearnerSection, OptimizerSection


def wrap_and_optimize(chunks: Sequence[Any], learner: LearnerSection) -> tuple[list[DistributedDataParallel], Any]:
    """Wrap the chunks in Megatron's DDP (gradients reduced in float32) and build AdamW over them.

    With bfloat16 parameters (FP8 has these too) the optimizer keeps float32 main copies.
    """
    config = chunks[0].config
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=learner.distributed_optimizer,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=learner.overlap_grad_reduce,
    )
    model = [
        # Buckets let the reduction begin before the backward pass of a chunk ends. Later virtual chunks need none:
        # their reduction runs beside the backward passes of the chunks before them.
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    section = learner.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=section.lr,
            min_lr=section.min_lr,
            weight_decay=section.weight_decay,
            adam_beta1=section.betas[0],
            adam_beta2=section.betas[1],
            adam_eps=section.eps,
            clip_grad=section.clip_grad,
            bf16=learner.precision != "fp32",
            params_dtype=config.params_dtype,
            use_distributed_optimizer=learner.distributed_optimizer,
        ),
        model,
    )
    config.finalize_model_grads_func = finalize_model_grads
    if learner.overlap_grad_reduce:
        # Only the last micro-batch's backward pass may send gradients.
        config.no_sync_func = [chunk.no_sync for chunk in model]
        config.grad_sync_func = [chunk.start_grad_sync for chunk in model]
        if len(model) == 1:
            config.no_sync_func, config.grad_sync_func = config.no_sync_func[0], config.grad_sync_func[0]
    return model, optimizer


def follow_recipe(optimizer: Any, section: OptimizerSection, lr: float) -> None:
    """Make the next step one of the recipe's AdamW, at learning rate `lr`.

    Megatron's groups carry multipliers (no decay on norms and biases) that only its own scheduler applies. A loaded
    checkpoint replaces the groups by those that were saved, and a fork may have a recipe of its own.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = section.weight_decay * group.get("wd_mult", 1.0)
        group["betas"], group["eps"] = section.betas, section.eps


def reduced_gradient_norm(optimizer: Any) -> float:
    """Hand the reduced gradients to the optimizer; their global L2 norm. Nothing is changed but gradients."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def step_with_clipping(optimizer: Any, grad_norm: float, clip_grad: float) -> None:
    """Scale the gradients down to a global norm of `clip_grad` (0: leave them) and step.

    `grad_norm` must be `reduced_gradient_norm` of these gradients, known to be finite.
    """
    for part in optimizer.chained_optimizers:
        parameters = part.get_parameters()
        if clip_grad > 0.0 and parameters:
            with torch.no_grad():
                clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=grad_norm)
    optimizer.step_with_ready_grads()
