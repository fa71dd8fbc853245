"""What a rank does for tests of checkpoints, and how much memory a save takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from launch.verify.layout_ranks import TEMPERATURE, train
from megatron_bridge.checkpoint import training_state
from megatron_bridge.learner import MegatronLearner
from pipeline.config.recipe import LearnerSection, OptimizerSection
from precision.objectives.p3o import P3O
from tests.support.learners import learner_here


def section(**settings: Any) -> LearnerSection:
    optimizer = OptimizerSection(lr=1e-3, warmup_steps=0)
    return LearnerSection(**dict(precision="bf16", micro_batch_tokens=256, optimizer=optimizer) | settings)


def save_both_forms(model: Path, folder: Path, settings: dict[str, Any]) -> dict[str, int]:
    """One step, then the same state in folder/gathered, as Megatron-Core would write it, and in folder/shared, as this
    rank does. Bytes of host memory for the latter and for loading it; of the weights and of the optimizer's share."""
    with learner_here(model, section(**settings), P3O(), temperature=TEMPERATURE, seed=0, total_steps=4) as trained:
        train(trained, 0)
        ours = training_state.share_optimizer_state
        training_state.share_optimizer_state = lambda: None
        trained.save(folder / "gathered")
        training_state.share_optimizer_state = ours
        saving = peak_bytes(lambda: trained.save(folder / "shared"))
        loading = peak_bytes(lambda: trained.load(folder / "shared"))
        return {"saving": saving, "loading": loading} | held_bytes(trained)


def held_bytes(learner: MegatronLearner) -> dict[str, int]:
    """Bytes of the weights that this rank writes for all, and of its share of main copies and moments."""
    weights = sum(p.nbytes for chunk in learner.model for p in chunk.module.parameters()) * (dist.get_rank() == 0)
    parts = [part for part in learner.optimizer.chained_optimizers if part.optimizer.param_groups]
    main = sum(p.nbytes for part in parts for group in part.optimizer.param_groups for p in group["params"])
    return {"weights": weights, "optimizer": 3 * main}


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most bytes of tensors on the host that were there at once, above those before, by torch's own count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    assert seen.profiler is not None
    events = seen.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
