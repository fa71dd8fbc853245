"""Learners in the test's own process, of which nothing stays once they are left; the loop on recorded batches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch.build.learner import build_trainer
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import leave_layout
from pipeline.config.recipe import Recipe
from pipeline.data.batch import LogprobContract
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.trainer.checkpoints import Checkpoints
from pipeline.trainer.loop import Trainer


@contextmanager
def learner_here(*arguments: Any, **named: Any) -> Iterator[MegatronLearner]:
    """`MegatronLearner.create`, and the layout is left at the end."""
    learner = None
    try:
        learner = MegatronLearner.create(*arguments, **named)
        yield learner
    finally:
        if learner is not None:
            _forget_graphs(learner)
        del learner
        leave_layout()
        gc.collect()


def trainer_on(
    folder: Path,
    recipe: Recipe,
    learner: MegatronLearner,
    store: BatchStore,
    *,
    contract: LogprobContract,
    every: int,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Trainer:
    """The product's loop in a run at `folder`, on the batches of `store`; it saves `every` so many steps."""
    run = RunDirectory(folder)
    run.make_folders()
    return build_trainer(
        run,
        recipe,
        learner,
        store=store,
        contract=contract,
        checkpoints=Checkpoints(run.checkpoints, keep=2),
        checkpoint_every=every,
        event_log=EventLog(run.path, "learner-000001"),
        stop_requested=stop_requested,
    )


def _forget_graphs(learner: MegatronLearner) -> None:
    """Drop the graph of the last micro-batch, which Megatron's token dispatchers keep.

    It leads over gradient hooks back to the learner, through C++, where Python's collector does not see it: the
    learner would stay for ever, and with it each process group's two threads and their descriptors.
    """
    for chunk in learner.model:
        for module in chunk.modules():
            held = vars(getattr(module, "token_dispatcher", None) or object)
            for name in [name for name, value in held.items() if isinstance(value, Tensor) and value.grad_fn]:
                setattr(module.token_dispatcher, name, None)


def leave_world() -> None:
    """Leave the parallel groups and the process group, so that another test may join others."""
    leave_layout()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
