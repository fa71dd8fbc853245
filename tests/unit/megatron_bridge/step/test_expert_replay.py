"""Replayed experts on a real learner, against transformers with its routers told the same experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from launch.verify.layout_ranks import TEMPERATURE, make_batch, random_experts
from launch.verify.layouts import write_model
from megatron_bridge import learner as learner_module
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.step.micro_batches import Plan
from pipeline.config.recipe import LearnerSection, OptimizerSection
from pipeline.data.batch import Batch
from pipeline.data.routed_experts import RoutedExperts
from pipeline.errors import ExpertReplayError
from precision.supervised import Supervised
from tests.doubles.tiny_model import reference_model
from tests.support.learners import learner_here


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "experts", experts=True)
    write_model(folder / "dense", experts=False)
    return folder


@contextmanager
def learner(model: Path, **section: Any) -> Iterator[MegatronLearner]:
    settings = dict(
        precision="fp32", micro_batch_tokens=192, optimizer=OptimizerSection(lr=1e-3, warmup_steps=0, eps=1e-4)
    )
    with learner_here(
        model, LearnerSection(**settings | section), Supervised(), temperature=TEMPERATURE, seed=0, total_steps=3
    ) as created:
        yield created


def with_experts(trained: MegatronLearner, unknown: float = 0.25) -> Batch:
    batch = make_batch(0, trained.model_config.vocab_size)
    return replace(batch, experts=random_experts(batch, trained.model_config, seed=1, unknown=unknown))


class ToldRouter(nn.Module):
    """Qwen3MoeTopKRouter, told the experts of its rows; -1 leaves the choice to it."""

    def __init__(self, original: Any, told: list[Tensor]) -> None:
        super().__init__()
        self.original = original
        self.told = told
        self.weight = original.weight

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), self.weight)
        probabilities = logits.float().softmax(-1)
        told = self.told[0]
        chosen = torch.where(told < 0, probabilities.topk(told.shape[1]).indices, told)
        scores = probabilities.gather(1, chosen)
        return logits, scores / scores.sum(-1, keepdim=True), chosen


def reference(model: Path, batch: Batch) -> tuple[NDArray[np.float32], float]:
    """[responses] log-probabilities at the sampling's temperature, and the gradient's norm of the mean token's negative
    log-likelihood, by transformers with its routers told the batch's experts."""
    network = reference_model(model)
    told: list[list[Tensor]] = []
    for block in network.get_submodule("model.layers").children():
        told.append([])
        block.mlp.gate = ToldRouter(block.mlp.gate, told[-1])  # type: ignore[union-attr, assignment]
    assert batch.experts is not None
    found: list[Tensor] = []
    for sample in range(batch.num_samples):
        start, stop = batch.sample_offsets[sample], batch.sample_offsets[sample + 1] - 1
        rows = batch.experts[slice(start, stop)]
        ids = torch.from_numpy(np.where(rows.known[:, None, None], rows.ids.astype(np.int64), -1))
        for layer, box in enumerate(told):
            box[:] = [ids[:, layer]]
        tokens = torch.from_numpy(batch.sample_tokens(sample).astype(np.int64))
        logits = network(tokens[None, :-1]).logits[0] / TEMPERATURE
        logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        found.append(logprobs[batch.prompt_lengths[sample] - 1 :])
    flat = torch.cat(found)
    (-flat.sum() / len(flat)).backward()  # type: ignore[no-untyped-call]
    squares = sum(float((p.grad.double() ** 2).sum()) for p in network.parameters() if p.grad is not None)
    return flat.detach().numpy(), squares**0.5


def test_scores_and_gradients_are_those_of_transformers_told_the_same_experts(models: Path) -> None:
    with learner(models / "experts") as trained:
        batch = with_experts(trained)
        theirs, norm = reference(models / "experts", batch)
        ours = trained.logprobs(batch)
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
        assert np.abs(trained.logprobs(replace(batch, experts=None)) - theirs).mean() > 1e-2
        update = trained.update(batch, np.ones(batch.num_samples, np.float32), None)
        np.testing.assert_allclose(update.logprobs, theirs, atol=2e-5)
        assert update.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert update.metrics["experts_known_share"] == pytest.approx(0.75, abs=0.05)
        # 2 of 4 experts at random: 1 of 6 pairs is the learner's own.
        assert update.metrics["expert_rows_differ_share"] == pytest.approx(5 / 6, abs=0.03)
        assert update.metrics["expert_tokens_differ_share"] > 0.99


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("micro_batch_tokens", [48, 192])
def test_an_update_is_the_same_in_small_micro_batches_and_with_recompute(
    models: Path, recompute: str, micro_batch_tokens: int
) -> None:
    found = []
    for section in ({}, {"recompute": recompute, "micro_batch_tokens": micro_batch_tokens}):
        with learner(models / "experts", **section) as trained:
            batch = with_experts(trained)
            update = trained.update(batch, np.ones(batch.num_samples, np.float32), None)
            found.append((update.metrics["loss"], update.metrics["grad_norm"]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_unknown_rows_leave_the_choice_to_the_router(models: Path) -> None:
    with learner(models / "experts") as trained:
        batch = with_experts(trained, unknown=1.0)
        assert batch.experts is not None
        assert not batch.experts.known.any()
        np.testing.assert_array_equal(trained.logprobs(batch), trained.logprobs(replace(batch, experts=None)))


def test_rows_are_scored_without_the_engine_s_experts(models: Path) -> None:
    with learner(models / "experts") as trained:
        batch = with_experts(trained)
        rows = [batch.sample_tokens(sample).tolist() for sample in range(batch.num_samples)]
        own = trained.score_tokens(rows)
        tails = np.concatenate([scores[start - 1 :] for scores, start in zip(own, batch.prompt_lengths, strict=True)])
        np.testing.assert_allclose(tails, trained.logprobs(replace(batch, experts=None)), atol=1e-5)
        assert np.abs(tails - trained.logprobs(batch)).mean() > 1e-3


def test_samples_that_are_left_out_are_not_routed(models: Path) -> None:
    with learner(models / "experts") as trained:
        batch = with_experts(trained)
        chosen = np.arange(batch.num_samples) % 3 > 0
        update = trained.update(batch, np.ones(batch.num_samples, np.float32), None, trained=chosen)
        assert np.isfinite(update.metrics["grad_norm"])


Change = Callable[[Plan], Plan]


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, micro_batches=plan.micro_batches[:-1]),
        lambda plan: replace(plan, micro_batches=(*plan.micro_batches[:-1], plan.micro_batches[0])),
    ],
    ids=["a micro-batch is missing", "one comes twice"],
)
def test_each_row_is_routed_exactly_once(models: Path, monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    original = learner_module.plan_micro_batches
    with learner(models / "experts") as trained:
        batch = with_experts(trained)
        monkeypatch.setattr(learner_module, "plan_micro_batches", lambda *a, **k: change(original(*a, **k)))
        before = trained.step
        with pytest.raises(ExpertReplayError, match="not routed exactly once in each of 4 layers"):
            trained.update(batch, np.ones(batch.num_samples, np.float32), None)
        assert trained.step == before
        monkeypatch.undo()
        live = trained.logprobs(replace(batch, experts=None))
        assert np.isfinite(live).all()


def test_a_record_of_another_model_is_refused(models: Path) -> None:
    def cut(batch: Batch, **changes: Any) -> Batch:
        assert batch.experts is not None
        return replace(batch, experts=RoutedExperts(**vars(batch.experts) | changes))

    with learner(models / "experts") as trained:
        batch = with_experts(trained, unknown=0.0)
        assert batch.experts is not None
        ids = batch.experts.ids
        for other in (ids[:, :3], ids[..., :1], ids + np.uint8(7)):
            with pytest.raises(ExpertReplayError, match="train the model that sampled it"):
                trained.logprobs(cut(batch, ids=other))
    with learner(models / "dense") as trained, pytest.raises(ExpertReplayError, match="the model has none"):
        trained.logprobs(batch)
