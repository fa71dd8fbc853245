"""Build AdamW over Megatron's buffers, take its steps, and compute their learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_bridge.model.megatron_settings import megatron_config
from pipeline.config.recipe import LearnerSection, OptimizerSection


def wrap_and_optimize(chunks: Sequence[Any], learner: LearnerSection) -> tuple[list[DistributedDataParallel], Any]:
    """Wrap the chunks in Megatron's DDP (float32 reduction) and build AdamW; BF16 weights get float32 main copies."""
    config, given = chunks[0].config, learner.megatron
    own = dict(
        use_distributed_optimizer=learner.distributed_optimizer,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=learner.overlap_grad_reduce,
    )
    ddp_config = megatron_config("ddp", own, given.ddp)
    model = [
        # Buckets let the reduction begin before a chunk's backward pass ends. Later virtual chunks need none: their
        # reduction overlaps the backward passes of the chunks before them.
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if config.transformer_impl == "transformer_engine" and given.transformer.get("gradient_accumulation_fusion", True):
        add_gradients_in_products(model, config)
    section = learner.optimizer
    own_optimizer = dict[str, Any](
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
        overlap_param_gather=ddp_config.overlap_param_gather,
        store_param_remainders=False,  # a checkpoint holds main weights, not the rest beside 16-bit ones
    )
    optimizer = get_megatron_optimizer(megatron_config("optimizer", own_optimizer, given.optimizer), model)
    config.finalize_model_grads_func = finalize_model_grads
    if learner.overlap_grad_reduce:
        # Only the last micro-batch's backward pass may send gradients.
        config.no_sync_func = [chunk.no_sync for chunk in model]
        config.grad_sync_func = [chunk.start_grad_sync for chunk in model]
        if len(model) == 1:
            config.no_sync_func, config.grad_sync_func = config.no_sync_func[0], config.grad_sync_func[0]
    return model, optimizer


def add_gradients_in_products(model: Sequence[DistributedDataParallel], config: TransformerConfig) -> None:
    """Let Transformer Engine's linears add their weights' gradients, unrounded, to DDP's float32 buffers within the
    product. At a pass's first micro-batch an FP8 linear overwrites the buffer, which is 0 then. Megatron's own linears
    refuse the setting without Apex when they are built, so it is made afterwards, and the LM head keeps its own."""
    config.gradient_accumulation_fusion = True  # Megatron's CUDA graphs ask for it
    for module in (module for chunk in model for module in chunk.modules()):
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def take_step(optimizer: Any, section: OptimizerSection, lr: float, grad_norm: float) -> None:
    """Take one AdamW step at learning rate `lr`, on gradients scaled down to a global norm of `clip_grad` (0: not
    scaled). `grad_norm` must be the gradients' norm and finite. Megatron's groups carry multipliers (no decay on norms
    and biases) that only Megatron's scheduler applies, so this function applies them. It sets betas and eps anew,
    because a loaded checkpoint brings the saved groups and a fork's recipe may differ."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = section.weight_decay * group.get("wd_mult", 1.0)
        group["betas"], group["eps"] = section.betas, section.eps
    for part in optimizer.chained_optimizers:
        parameters = part.get_parameters()
        if section.clip_grad > 0.0 and parameters:
            with torch.no_grad():
                clip_grad_by_total_norm_fp32(
                    parameters,
                    max_norm=section.clip_grad,
                    total_norm=grad_norm,
                    use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )
    optimizer.step_with_ready_grads()


def finite_beside_norm(optimizer: Any) -> bool:
    """Return whether this rank's ready gradients are finite that `get_grad_norm` leaves out: its copies of what another
    rank counts, such as norms under tensor parallelism. A fault of one rank is in its own copy alone."""
    beside = list[torch.Tensor]()
    for part in optimizer.chained_optimizers:
        counted = set(map(id, part.get_main_grads_for_grad_norm()))
        beside += [p.grad for p in part.get_parameters() if p.grad is not None and id(p.grad) not in counted]
    return not beside or bool(torch.stack([grad.isfinite().all() for grad in beside]).all())


@dataclass(frozen=True)
class RateSpan:
    """The learning-rate settings from a batch on."""

    first_batch: int
    section: OptimizerSection
    total_steps: int
    """Planned optimizer steps of the run, had every batch `updates_per_batch` of them."""
    updates_per_batch: int = 1


@dataclass(frozen=True)
class LearningRates:
    """The learning rate of every optimizer step of a run. A trained step keeps its rate when the settings change."""

    spans: tuple[RateSpan, ...]
    """Ascending by batch, at least one."""

    @classmethod
    def of(cls, section: OptimizerSection, total_steps: int) -> LearningRates:
        """Return the rates of a run whose settings never changed."""
        return cls((RateSpan(0, section, total_steps),))

    def at(self, batch: int, step: int) -> float:
        """Return the rate of optimizer step `step` (from 0), which trains on `batch`."""
        spans = [one for one in self.spans if one.first_batch <= batch or one is self.spans[0]]
        return learning_rate(step, spans[-1].section, spans[-1].total_steps, partial(_place, spans))


def _place(spans: Sequence[RateSpan], step: int) -> float:
    """Return the place of `step` among the last span's `total_steps`: a batch of an earlier span counts as many steps
    as a batch of the last. It is exactly `step` if all spans have equally many steps a batch."""
    own, begun = spans[-1].updates_per_batch, 0
    for span, after in pairwise(spans):
        planned = (after.first_batch - span.first_batch) * span.updates_per_batch
        if step < begun + planned:
            return span.first_batch * own + (step - begun) * own / span.updates_per_batch
        begun += planned
    return spans[-1].first_batch * own + step - begun


def learning_rate(
    step: int, section: OptimizerSection, total_steps: int, place: Callable[[int], float] = float
) -> float:
    """Return the rate of optimizer step `step` (from 0): linear warm-up, then constant, or linear or cosine decay to
    `min_lr` at `decay_steps` or, by default, at the last of `total_steps`.

    `warmup_steps` and `decay_steps` count optimizer steps from the run's first, including those of a fork's parent. A
    decay over `total_steps` goes by batches: `place` maps a step to its place among them, so a fork with another number
    of steps a batch continues at its parent's rate and reaches `min_lr` with its last batch.

    The rate is a function of the step alone, so a resumed run needs no other state. Megatron's OptimizerParamScheduler
    is not used: it refuses a run no longer than its warm-up, takes the first step after the warm-up at a decayed rate
    instead of `lr`, and keeps a step count that a checkpoint would have to hold equal to the learner's.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.decay == "constant":
        return section.lr
    if section.decay_steps is not None:
        place, total_steps = float, section.decay_steps
    warm = place(section.warmup_steps)
    span = max(1.0, total_steps - 1 - warm)
    done = min(1.0, (place(step) - warm) / span)
    left = 1.0 - done if section.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return section.min_lr + (section.lr - section.min_lr) * left
