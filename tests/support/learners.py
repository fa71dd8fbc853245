"""Learners in the test's own process: after one is left, nothing of it stays in the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import leave_layout


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
