"""Training under emulated FP8, on real learners of one rank: what is rounded, when, and which way gradients go."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from launch.verify.layout_ranks import TEMPERATURE, make_batch, weights
from launch.verify.layouts import write_model
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.step import fp8_emulation
from megatron_bridge.step.fp8_emulation import Fp8Emulation, emulated
from megatron_bridge.step.micro_batches import TokenRows, plan_micro_batches
from megatron_bridge.weights import load_named
from pipeline.config.recipe import LearnerSection, OptimizerSection
from pipeline.errors import ModelError, NonFiniteError
from precision.formats.formats import fake_quantize, quantize_block
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import RolloutFormat
from precision.formats.streams import fake_quantize_state
from precision.supervised import Supervised
from tests.support.learners import learner_here

FORMATS = (pytest.param("fp8_tensor", marks=pytest.mark.slow), "fp8_block")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "dense", experts=False)
    write_model(folder / "experts", experts=True)
    return folder


def quant_map(model: str, rollout_format: str) -> QuantMap:
    return QuantMap.for_decoder(4, rollout_format, 4 if model == "experts" else None)


@contextmanager
def learner(
    model: Path, emulate: QuantMap | None, optimizer: OptimizerSection | None = None, **section: Any
) -> Iterator[MegatronLearner]:
    usual = OptimizerSection(lr=1e-3, warmup_steps=0, eps=1e-4, clip_grad=0.0)
    settings = dict(
        precision="fp32", micro_batch_tokens=192, optimizer=optimizer or usual, fp8_emulation=emulate is not None
    )
    with learner_here(
        model,
        LearnerSection(**settings | section),
        Supervised(),
        temperature=TEMPERATURE,
        seed=0,
        total_steps=3,
        emulate=emulate,
    ) as created:
        yield created


def step(trained: MegatronLearner, seed: int = 0) -> Any:
    batch = make_batch(seed, trained.model_config.vocab_size)
    return trained.update(batch, np.linspace(-1.0, 1.0, batch.num_samples, dtype=np.float32), None)


@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("rollout_format", FORMATS)
def test_training_sees_what_emulated_scoring_sees_bit_for_bit(models: Path, model: str, rollout_format: str) -> None:
    formats = quant_map(model, rollout_format)
    batch = make_batch(0, 48)
    with learner(models / model, None) as plain:
        unrounded = plain.logprobs(batch)
        with emulated(plain, formats):
            scored = plain.logprobs(batch)
    for recompute in ("none", "full"):
        with learner(models / model, formats, recompute=recompute) as trained:
            np.testing.assert_array_equal(trained.logprobs(batch), scored)
            np.testing.assert_array_equal(step(trained).logprobs, scored)
            with emulated(trained, None):
                assert not np.array_equal(trained.logprobs(batch), scored)
    assert np.abs(scored - unrounded).mean() > 1e-3


def gradients(trained: MegatronLearner) -> list[Tensor]:
    return [parameter.main_grad.clone() for chunk in trained.model for parameter in chunk.parameters()]


@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("rollout_format", FORMATS)
def test_gradients_are_those_of_the_straight_through_definition(models: Path, model: str, rollout_format: str) -> None:
    formats = quant_map(model, rollout_format)
    with learner(models / model, formats) as trained:
        ours, found_gradients = step(trained), gradients(trained)
    with learner(models / model, None) as reference:
        write_out_definition(reference, formats)
        theirs, expected = step(reference), gradients(reference)
    with learner(models / model, None) as plain:
        step(plain)
        unrounded = gradients(plain)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-6)
    for found, wanted, other in zip(found_gradients, expected, unrounded, strict=True):
        size = float(wanted.norm())
        assert float((found - wanted).norm()) <= 1e-5 * size
        assert float((other - wanted).norm()) > 1e-3 * size, "the definition is another than without rounding"


def write_out_definition(learner: MegatronLearner, formats: QuantMap) -> None:
    """Every quantized linear becomes its definition in plain autograd."""
    linears = [linear.module for linear in Fp8Emulation(learner, formats)._linears]
    masters = [linear.weight.detach().clone() for linear in linears]
    state = {name: tensor.clone() for name, tensor in learner.named_weights()}
    load_named(learner.model, learner.model_config, fake_quantize_state(state.items(), formats))
    (chosen,) = set(formats.formats.values())
    for linear in linears:
        linear.forward = definition(linear.weight, linear.weight.detach().clone(), chosen)
    with torch.no_grad():
        for linear, master in zip(linears, masters, strict=True):
            linear.weight.copy_(master)
    load_named(learner.model, learner.model_config, state.items())


def definition(weight: Tensor, rounded: Tensor, chosen: RolloutFormat) -> Any:
    def forward(hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        # x - x is exactly 0, and the derivative of the first x is 1.
        quantized = fake_quantize(hidden.detach(), chosen, per_token=True) + (hidden - hidden.detach())
        return quantized @ (rounded + (weight - weight.detach())).T, None

    return forward


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_keep_what_is_smaller_than_a_step_of_e4m3(models: Path, precision: str, distributed: bool) -> None:
    """Nearly every weight of the optimizer moves, and nearly none of those that the passes see."""
    tiny = OptimizerSection(lr=1e-6, warmup_steps=0, weight_decay=0.0, clip_grad=0.0)
    with learner(
        models / "dense", quant_map("dense", "fp8_block"), tiny, precision=precision, distributed_optimizer=distributed
    ) as trained:
        before, e4m3 = main_weights(trained), e4m3_weights(trained)
        step(trained)
        change, e4m3_after = main_weights(trained) - before, e4m3_weights(trained)
    assert float((change != 0).double().mean()) > 0.9
    assert float(change.abs().max()) <= 2e-6
    assert float((e4m3 != e4m3_after).double().mean()) < 0.01


@pytest.mark.parametrize("distributed", [True, False])
def test_passes_see_the_weights_of_the_last_step(models: Path, distributed: bool) -> None:
    """In BF16 Megatron's optimizer writes parameters behind autograd's back."""
    formats, batch = quant_map("dense", "fp8_block"), make_batch(0, 48)
    with learner(models / "dense", formats, precision="bf16", distributed_optimizer=distributed) as trained:
        before = trained.logprobs(batch)
        step(trained)
        after = trained.logprobs(batch)
        with emulated(trained, formats):
            np.testing.assert_array_equal(trained.logprobs(batch), after)
    assert not np.array_equal(before, after)


def main_weights(learner: MegatronLearner) -> Tensor:
    """The optimizer's float32 weights, as one vector."""
    parts = [p for part in learner.optimizer.chained_optimizers for p in part.get_parameters()]
    assert {part.dtype for part in parts} == {torch.float32}
    return torch.cat([part.detach().flatten().clone() for part in parts])


def e4m3_weights(learner: MegatronLearner) -> Tensor:
    """The quantized values of every linear, without their scales, as one vector."""
    named = ((name, tensor) for name, tensor in learner.named_weights() if ".layers." in name and tensor.dim() == 2)
    return torch.cat([quantize_block(tensor)[0].float().flatten() for _, tensor in named])


def test_weights_are_rounded_once_for_each_optimizer_step(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded: list[int] = []

    def counting(named: Any, formats: QuantMap) -> Any:
        rounded.append(trained.step)
        return fake_quantize_state(named, formats)

    monkeypatch.setattr(fp8_emulation, "fake_quantize_state", counting)
    with learner(models / "dense", quant_map("dense", "fp8_block")) as trained:
        batch = make_batch(0, 48)
        assert (
            len(
                plan_micro_batches(
                    TokenRows.of_batch(batch),
                    micro_batch_tokens=trained.section.micro_batch_tokens,
                    split=trained.split,
                ).micro_batches
            )
            > 1
        )
        for _ in range(2):
            trained.logprobs(batch)
            trained.score_tokens([[1, 2, 3]])
            step(trained)
        assert rounded == [0, 1]
        trained.logprobs(batch)
        with torch.no_grad():  # an in-place change that nobody announces
            next(iter(trained.emulation._linears)).module.weight.mul_(1.5)  # type: ignore[union-attr]
        trained.logprobs(batch)
        trained.logprobs(batch)
    assert rounded == [0, 1, 2, 2]


def test_what_is_exported_and_saved_is_not_rounded(models: Path, tmp_path: Path) -> None:
    formats, batch = quant_map("experts", "fp8_tensor"), make_batch(1, 48)
    with learner(models / "experts", formats) as trained:
        before = weights(trained)
        trained.logprobs(batch)
        np.testing.assert_array_equal(weights(trained), before)
        step(trained)
        after, scored = weights(trained), trained.logprobs(batch)
        (tmp_path / "saved").mkdir()
        trained.save(tmp_path / "saved")
        step(trained)
        trained.load(tmp_path / "saved")
        np.testing.assert_array_equal(weights(trained), after)
        np.testing.assert_array_equal(trained.logprobs(batch), scored)
    with learner(models / "experts", None) as plain:
        np.testing.assert_array_equal(weights(plain), before)


def test_another_map_takes_effect_at_the_next_pass(models: Path) -> None:
    whole, batch = quant_map("dense", "fp8_block"), make_batch(0, 48)
    half = whole.restricted(module for module in whole.formats if ".layers.0." in module or ".layers.1." in module)
    with learner(models / "dense", whole) as trained:
        first = trained.logprobs(batch)
        trained.emulate(half)
        second = trained.logprobs(batch)
        trained.emulate(None)
        plain = trained.logprobs(batch)
        trained.emulate(whole)
        np.testing.assert_array_equal(trained.logprobs(batch), first)
    assert 0 < np.abs(second - plain).mean() < np.abs(first - plain).mean()


def test_numbers_that_are_not_finite_reach_no_optimizer_step(models: Path) -> None:
    with learner(models / "dense", quant_map("dense", "fp8_block")) as trained:
        before = weights(trained)
        (chunk,) = [chunk.module for chunk in trained.model]
        norm = chunk.decoder.layers[0].input_layernorm.weight
        with torch.no_grad():
            norm[0] = torch.inf
        with pytest.raises(NonFiniteError, match="no step was taken"):
            step(trained)
        with torch.no_grad():
            norm[0] = 1.0
            chunk.decoder.layers[3].mlp.linear_fc1.weight[0, 0] = torch.nan
        with pytest.raises(NonFiniteError, match=r"model\.layers\.3\.mlp\.gate_proj\.weight: .* last checkpoint"):
            step(trained)
        assert trained.step == 0
    assert np.isfinite(before).all()


def test_a_gradient_that_is_not_finite_is_made_once_more_from_the_same_state(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A flaky GPU ended the run. The step is the one that would have been taken; a second failure ends it."""
    with learner(models / "dense", None) as trained:
        usual = step(trained).metrics
        right = weights(trained)
    norms = iter([math.nan, None, math.nan, math.inf])

    with learner(models / "dense", None) as trained:
        norm_of = trained.optimizer.get_grad_norm

        def flaky() -> float:
            norm: float = norm_of()
            return norm if (wrong := next(norms)) is None else wrong

        monkeypatch.setattr(trained.optimizer, "get_grad_norm", flaky)
        found = step(trained).metrics
        np.testing.assert_array_equal(weights(trained), right)
        assert (usual["gradient_retries"], found["gradient_retries"]) == (0.0, 1.0)
        assert found["grad_norm"] == usual["grad_norm"]
        assert "the gradient norm nan the first time" in caplog.text
        with pytest.raises(NonFiniteError, match=r"the gradient norm inf, first .*the gradient norm nan; no step was"):
            step(trained, 1)
        np.testing.assert_array_equal(weights(trained), right)


def test_a_rank_whose_weight_is_not_finite_gathers_all_the_same(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share a later linear, but not this one, are in its gather."""
    at_the_end = list[int]()
    whole_weights = Fp8Emulation._whole_weights

    def counted(self: Fp8Emulation) -> Iterator[tuple[str, Tensor]]:
        gathered = list(whole_weights(self))
        yield from gathered
        at_the_end.append(len(gathered))

    monkeypatch.setattr(Fp8Emulation, "_whole_weights", counted)
    with learner(models / "experts", quant_map("experts", "fp8_block")) as trained:
        trained.score_tokens([[1, 2, 3]])
        (chunk,) = [chunk.module for chunk in trained.model]
        with torch.no_grad():
            chunk.decoder.layers[0].mlp.experts.local_experts[0].linear_fc1.weight[0, 0] = torch.nan
        with pytest.raises(NonFiniteError, match=r"layers\.0\.mlp\.experts\.0\."):
            trained.score_tokens([[1, 2, 3]])
    assert at_the_end[0] > 0
    assert at_the_end == at_the_end[:1] * 2


def test_a_map_of_another_model_is_refused(models: Path) -> None:
    with (
        pytest.raises(ModelError, match=r"model\.layers\.4\.\S+, which is no linear layer of this"),
        learner(models / "dense", QuantMap.for_decoder(5, "fp8_block")),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"learner\.fp8_emulation is true, but the learner was given no quant map"),
        learner(models / "dense", None, fp8_emulation=True),
    ):
        pass
