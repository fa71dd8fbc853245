"""Steps in which one rank's gradient is wrong for some passes; see test_flaky_rank.py."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from launch.verify.layout_ranks import make_batch, weights
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import Layout, initialize, leave_layout
from pipeline.config.recipe import LearnerSection, OptimizerSection, parse_layout
from pipeline.errors import NonFiniteError
from precision.objectives.p3o import P3O


def measure(folder: Path, layout: str, where: str) -> dict[str, Any]:
    """Take a step without a fault, then one whose first pass is wrong on rank 1, then one of which both are. `where`:
    `before` the ranks sum their gradients, or in what the optimizer has of a `matrix` or a `norm` afterwards."""
    base = LearnerSection(precision="fp32", micro_batch_tokens=48, optimizer=OptimizerSection(lr=1e-3, warmup_steps=0))
    section = base.model_copy(update=parse_layout(layout))
    found: dict[str, Any] = {}
    for faults in (0, 1, 2):
        initialize(Layout.of(section), seed=0, deadline_s=120)
        learner = MegatronLearner(folder, section, P3O(), temperature=0.9, total_steps=1)
        batch, before, said = make_batch(0, learner.model_config.vocab_size), weights(learner), list[str]()
        handler = logging.Handler()
        handler.emit = lambda record, said=said: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("megatron_bridge.learner").addHandler(handler)
        left = _break(learner, where, faults if dist.get_rank() == 1 else 0)
        scored = learner.logprobs(batch)
        advantages = (batch.reward - batch.reward.mean()).astype(np.float32)
        try:
            metrics, error = learner.update(batch, advantages, scored).metrics, ""
        except NonFiniteError as raised:
            metrics, error = {}, str(raised)
        logging.getLogger("megatron_bridge.learner").removeHandler(handler)
        own = [parameter.detach().clone() for chunk in learner.model for parameter in chunk.parameters()]
        found[str(faults)] = dict(
            retries=metrics.get("gradient_retries"),
            error=error,
            said=said,
            unused=left[0],
            moved=float(np.abs(weights(learner) - before).max()),
            finite=all(bool(parameter.isfinite().all()) for parameter in own),
            own=torch.cat([parameter.flatten() for parameter in own]).numpy(),
        )
        leave_layout()
    return found


def _break(learner: MegatronLearner, where: str, faults: int) -> list[int]:
    """Make the next `faults` gradients of this rank not finite; return how many are left, in a list."""
    left, prepare = [faults], learner.optimizer.prepare_grads

    def broken() -> Any:
        done = prepare()
        wrong_now, left[0] = left[0] > 0, max(0, left[0] - 1)
        if wrong_now and where != "before":
            parameters = [p for part in learner.optimizer.chained_optimizers for p in part.get_parameters()]
            cut = [p for p in parameters if bool(getattr(p, "tensor_model_parallel", False)) == (where == "matrix")]
            cut[0].grad.view(-1)[0] = torch.nan
        return done

    learner.optimizer.prepare_grads = broken
    if where == "before":
        (parameter, *_) = [p for chunk in learner.model for p in chunk.parameters() if p.dim() == 2]

        def wrong(gradient: torch.Tensor) -> torch.Tensor:
            return torch.full_like(gradient, torch.nan) if left[0] else gradient

        parameter.register_hook(wrong)
    return left
