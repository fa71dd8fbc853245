"""What the learner and Megatron agree with Transformer Engine's linears, by a linear that keeps TE's side of it.

TE 2.11 (module/linear.py): a linear with `fuse_wgrad_accumulation` adds its gradient to `weight.main_grad`, overwrites
it at a first micro-batch, says so in `weight.grad_added_to_main_grad`, and returns a gradient without values. It casts
its FP8 weight where `is_first_microbatch` is True, and uses that cast afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from launch.verify.layout_ranks import TEMPERATURE, make_batch, train, weights
from launch.verify.layouts import write_model
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.step.optimizer import add_gradients_in_products
from pipeline.config.recipe import LearnerSection, OptimizerSection
from precision.objectives.p3o import P3O
from tests.support.learners import learner_here


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, linear: LikeTE, first: bool) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.linear, ctx.first = linear, first
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (hidden,), weight = ctx.saved_tensors, ctx.linear.weight
        wgrad = grads[0].flatten(0, 1).t() @ hidden.flatten(0, 1)
        if ctx.linear.fuse_wgrad_accumulation:
            weight.main_grad.copy_(wgrad) if ctx.first else weight.main_grad.add_(wgrad)
            weight.grad_added_to_main_grad = True
            wgrad = torch.full_like(wgrad, torch.nan)
        return grads[0] @ weight, wgrad, None, None


class LikeTE(torch.nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.fuse_wgrad_accumulation, self.is_first_microbatch = False, True
        self.firsts: list[bool] = []

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        first, self.is_first_microbatch = self.is_first_microbatch, False
        self.firsts.append(first)
        return _Product.apply(hidden, self.weight, self, first), None  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "dense"
    write_model(folder, experts=False)
    return folder


def like_te(trained: MegatronLearner) -> list[LikeTE]:
    """Put such linears in place of the MLPs' first ones."""
    (chunk,) = trained.model
    made = []
    for layer in chunk.module.decoder.layers:
        layer.mlp.linear_fc1 = LikeTE(layer.mlp.linear_fc1.weight)
        made.append(layer.mlp.linear_fc1)
    return made


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_gradients_are_added_in_the_product_once(model: Path, precision: str) -> None:
    section = LearnerSection(
        precision="fp32", micro_batch_tokens=192, optimizer=OptimizerSection(lr=1e-3, warmup_steps=0, eps=1e-4)
    )
    found = []
    for fused in (False, True):
        with learner_here(model, section, P3O(), temperature=TEMPERATURE, seed=0, total_steps=3) as trained:
            linears = like_te(trained)
            if fused:
                config = trained.model[0].config
                config.fp8 = None if precision == "bf16" else "hybrid"
                add_gradients_in_products(trained.model, config)
                assert all(linear.fuse_wgrad_accumulation for linear in linears)
            rows = [train(trained, step) for step in range(2)]
            found.append(np.concatenate([[row["grad_norm"] for row in rows], weights(trained)]))
    assert np.abs(found[0] - found[1]).max() < 1e-6


def test_weights_are_cast_once_a_pass(model: Path) -> None:
    section = LearnerSection(precision="fp32", micro_batch_tokens=192)
    with learner_here(model, section, P3O(), temperature=TEMPERATURE, seed=0, total_steps=3) as trained:
        linear, *_ = like_te(trained)
        trained.model[0].config.fp8 = "hybrid"
        batch = make_batch(0, trained.model_config.vocab_size)
        for _ in range(2):
            linear.firsts.clear()
            trained.score(batch)
            assert len(linear.firsts) > 1, "several micro-batches"
            assert linear.firsts == [True] + [False] * (len(linear.firsts) - 1)
