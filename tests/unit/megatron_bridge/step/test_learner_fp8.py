"""What FP8 training changes around the products, on real learners in float32: padding, warm-up passes, scoring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from launch.verify.layout_ranks import TEMPERATURE, make_batch, train, weights
from launch.verify.layouts import write_model
from megatron_bridge import learner as learner_module
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.step import passes
from megatron_bridge.step.fp8_emulation import emulated
from pipeline.config.recipe import LearnerSection, OptimizerSection
from pipeline.errors import ModelError
from precision.formats.quant_map import QuantMap
from precision.objectives.clipped import Clipped
from precision.objectives.objective import Objective
from precision.objectives.p3o import P3O
from tests.support.learners import learner_here

MICRO_BATCH_TOKENS = 192


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "dense", experts=False)
    write_model(folder / "experts", experts=True)
    return folder


@contextmanager
def learner(model: Path, objective: Objective | None = None, **section: Any) -> Iterator[MegatronLearner]:
    # A large eps, so that the step is a smooth function of the gradient.
    settings = dict(
        precision="fp32",
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        optimizer=OptimizerSection(lr=1e-3, warmup_steps=0, eps=1e-4),
    )
    with learner_here(
        model, LearnerSection(**settings | section), objective or P3O(), temperature=TEMPERATURE, seed=0, total_steps=3
    ) as created:
        yield created


def after_two_steps(model: Path, prepare: Callable[[MegatronLearner], None] = lambda _: None) -> NDArray[np.float64]:
    """loss, grad_norm and ess of two steps, then every weight."""
    with learner(model) as trained:
        prepare(trained)
        rows = [train(trained, step) for step in range(2)]
        seen = [[row[name] for row in rows] for name in ("loss", "grad_norm", "ess")]
        return np.concatenate([*seen, weights(trained)])


@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("multiple", [16, 64])
def test_padding_changes_neither_loss_nor_gradients(
    models: Path, monkeypatch: pytest.MonkeyPatch, model: str, multiple: int
) -> None:
    plain = after_two_steps(models / model)
    totals: set[int] = set()
    original = passes.packed_rows

    def watched(micro_batch: Any, *arguments: Any) -> Any:
        totals.add(int(micro_batch.row_ends[-1]))
        return original(micro_batch, *arguments)

    monkeypatch.setattr(learner_module, "token_multiple", lambda precision: multiple)
    monkeypatch.setattr(passes, "packed_rows", watched)
    padded = after_two_steps(models / model)
    assert totals
    assert all(total % multiple == 0 for total in totals)
    assert np.abs(padded - plain).max() < 2e-6
    assert np.abs(plain[:6]).min() > 1e-4  # what is compared is there


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_one_shape_of_all_micro_batches_changes_neither(models: Path, model: str) -> None:
    """As CUDA graphs need it: rows without tokens at the end, and padding up to the budget."""

    def one_shape(trained: MegatronLearner) -> None:
        trained.split = replace(trained.split, row_slots=9)

    assert np.abs(after_two_steps(models / model, one_shape) - after_two_steps(models / model)).max() < 2e-6


def test_warm_up_passes_leave_nothing_but_scales(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = passes.warm_up

    def counted(*arguments: Any) -> None:
        original(*arguments)
        gradients = [p.main_grad.abs().max().item() for chunk in arguments[0] for p in chunk.module.parameters()]
        calls.append(int(max(gradients) > 0.0))

    monkeypatch.setattr(passes, "warm_up", counted)
    plain = after_two_steps(models / "dense")
    assert calls == []
    monkeypatch.setattr(learner_module, "warm_up_passes", lambda precision: 3)
    assert np.array_equal(after_two_steps(models / "dense"), plain)
    assert calls == [1, 1, 1]  # forward and backward, once for a run


def test_a_checkpoint_that_is_loaded_warms_up_again(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_module, "warm_up_passes", lambda precision: 2)
    monkeypatch.setattr(learner_module.training_state, "load", lambda *_, **__: 5)
    with learner(models / "dense") as trained:
        assert trained._warm_ups == 2
        trained.score_tokens([[1, 2, 3]])
        assert trained._warm_ups == 0
        trained.load(tmp_path)
        assert (trained._warm_ups, trained.step) == (2, 5)


def test_a_learner_that_trains_before_it_scores_warms_up_too(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GRPO does, and any whose step needs no scores."""
    order: list[str] = []
    for name in ("warm_up", "train", "score"):
        watch(monkeypatch, name, order)
    monkeypatch.setattr(learner_module, "warm_up_passes", lambda precision: 2)
    batch = make_batch(0, vocabulary=13)
    with learner(models / "dense", objective=Clipped()) as trained:
        trained.update(batch, np.ones(batch.num_samples, np.float32), None)
        trained.score(batch)
    assert order == ["warm_up", "warm_up", "train", "score"]


def watch(monkeypatch: pytest.MonkeyPatch, name: str, order: list[str]) -> None:
    original = getattr(passes, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        order.append(name)
        return original(*arguments, **named)

    monkeypatch.setattr(passes, name, watched)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_scoring_keeps_nothing_for_a_backward_pass(models: Path, recompute: str) -> None:
    batch = make_batch(0, vocabulary=13)
    with learner(models / "dense") as plain:
        wanted = plain.logprobs(batch)
    modes: set[bool] = set()
    with learner(models / "dense", recompute=recompute) as trained:
        (chunk,) = trained.model
        layer = chunk.module.decoder.layers[0]
        layer.register_forward_hook(lambda module, *_: modes.add(module.training))
        assert np.array_equal(trained.logprobs(batch), wanted)
        assert modes == {False}
        train(trained, 0)
        assert modes == {False, True}
        assert chunk.training


def test_emulation_refuses_transformer_engine_layers(models: Path) -> None:
    with learner(models / "dense") as scored:
        assert scored.layers == "megatron"
        scored.layers = "transformer_engine"
        with (
            pytest.raises(ModelError, match=r"needs Megatron's own layers.*layers=\"megatron\""),
            emulated(scored, QuantMap.for_decoder(4, "fp8_block", None)),
        ):
            pass
    assert torch.is_grad_enabled()
