"""Log-probabilities stay where the learner computed them, from scoring to the end of the update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.verify.layout_ranks import TEMPERATURE, make_batch
from launch.verify.layouts import write_model
from pipeline.advantages.compute import AdvantageComputer
from pipeline.advantages.methods import DrGRPO
from pipeline.config.recipe import LearnerSection, OptimizerSection
from pipeline.trainer.loop import Scoring, Trainer
from precision.objectives.p3o import P4O
from tests.support.batches import update_of
from tests.support.learners import learner_here

TO_HOST = ("cpu", "numpy", "tolist", "__array__")


@contextmanager
def copies_to_host(least: int) -> Iterator[list[str]]:
    """The copies to the host of rows of at least so many floating point numbers, while the block runs. Statistics are
    tables of several rows, whose size does not depend on the tokens."""
    found: list[str] = []

    def counted(name: str, plain: Any) -> Any:
        def copy(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
            if tensor.is_floating_point() and tensor.numel() >= least and tensor.squeeze().ndim == 1:
                found.append(name)
            return plain(tensor, *arguments, **named)

        return copy

    with pytest.MonkeyPatch.context() as patch:
        for name in TO_HOST:
            patch.setattr(Tensor, name, counted(name, getattr(Tensor, name)))
        yield found


@pytest.mark.parametrize("updates", [1, 2])
def test_a_step_copies_no_log_probabilities_to_the_host(tmp_path: Path, updates: int) -> None:
    write_model(tmp_path / "model", experts=False)
    section = LearnerSection(
        precision="fp32", micro_batch_tokens=192, optimizer=OptimizerSection(lr=1e-3, warmup_steps=0)
    )
    settings = DrGRPO.model_validate(dict(aggregation="token"))
    computer = AdvantageComputer(section=settings, estimator=settings.estimator(), max_new_tokens=9)
    with learner_here(tmp_path / "model", section, P4O(), temperature=TEMPERATURE, seed=0, total_steps=2) as learner:
        fields: dict[str, Any] = {name: None for name, field in Trainer.__dataclass_fields__.items() if field.init}
        trainer = Trainer(
            **fields
            | dict(
                learner=learner,
                advantage_computer=computer,
                scoring=Scoring(prepares=True, reads_step=True, reads_old=True),
                updates_per_batch=updates,
                lr_by_lag="none",
                old_logprobs=SimpleNamespace(of=lambda batch, *_: learner.score(batch), versions=None),
            )
        )
        batch = make_batch(0, learner.model_config.vocab_size)
        least = batch.num_response_tokens // 4  # a mini-batch has about half of them
        with copies_to_host(least) as copies:
            assert torch.ones(least).tolist(), "what is counted"
            assert copies == ["tolist"]
            copies.clear()
            update = update_of(trainer, batch)
            assert copies == []
            assert len(update.logprobs) == batch.num_response_tokens
            assert copies, "whoever writes them copies them"
            copies.clear()
            assert update.logprobs is update.logprobs
            assert copies == [], "once"
