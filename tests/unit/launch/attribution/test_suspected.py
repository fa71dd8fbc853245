"""Faults that a real learner tries in its own weights, and the probe of a publish; no engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from launch.attribution.score_ranks import effects, other_maps
from launch.verify.layouts import write_model
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.step.fp8_emulation import emulated
from megatron_bridge.step.host_weights import NamedTensors, changed, rounded, scaled
from megatron_bridge.weight_sync.disk import ProbeScorer
from pipeline.config.recipe import LearnerSection
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import RolloutFormat
from precision.formats.streams import fake_quantize_state
from precision.mismatch.attribution import suspects
from precision.supervised import Supervised
from tests.support.learners import learner_here

# Megatron-Core calls much of itself and of torch deprecated.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")
]

Scores = NDArray[np.float64]
MODULE = "model.layers.1.mlp.down_proj"
GROUP = "model.layers.2.self_attn.qkv_proj"
ALIKE = {f"scale:model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")}
"""Scales of MODULE and of up_proj are one function. In a random model the gate is nearly linear: its scale is too."""


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegatronLearner]:
    model = tmp_path_factory.mktemp("models") / "tiny"
    write_model(model, experts=False)
    with learner_here(
        model,
        LearnerSection(precision="fp32", step_deadline_s=60),
        Supervised(),
        temperature=1.0,
        seed=0,
        total_steps=1,
    ) as created:
        yield created


@pytest.fixture
def rows(learner: MegatronLearner) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, learner.model_config.vocab_size, 33).tolist() for _ in range(8)]


@pytest.fixture
def quant(learner: MegatronLearner) -> QuantMap:
    return QuantMap.for_decoder(learner.model_config.num_layers, "fp8_block")


def flat(learner: MegatronLearner, rows: list[list[int]]) -> Scores:
    return np.concatenate(learner.score_tokens(rows)).astype(np.float64)


def unchanged(tensors: NamedTensors) -> NamedTensors:
    return tensors


@pytest.mark.parametrize("usual", [one for one in RolloutFormat if one.is_served])
def testother_maps_come_in_one_order_and_engines_on_gpus_serve_them(usual: RolloutFormat) -> None:
    """Ranks score a map together: the order must be that of the formats, not of their hashes."""
    faults = [fault for fault, _ in other_maps(QuantMap.for_decoder(2, usual), usual)]
    served = [one for one in RolloutFormat if one.is_served and not one.is_emulated and one is not usual]
    assert [fault for fault in faults if fault.startswith("format:")] == [f"format:{one}" for one in served]


def test_changed_weights_are_restored_bit_by_bit(learner: MegatronLearner, rows: list[list[int]]) -> None:
    before = {name: tensor.clone() for name, tensor in learner.named_weights()}
    plain = flat(learner, rows)
    with changed(learner, scaled(MODULE, 2.0)):
        inside = {name: tensor.clone() for name, tensor in learner.named_weights()}
        assert torch.equal(inside[f"{MODULE}.weight"], 2.0 * before[f"{MODULE}.weight"])
        assert sum(not torch.equal(inside[name], tensor) for name, tensor in before.items()) == 1
        assert np.abs(flat(learner, rows) - plain).max() > 1e-4
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.named_weights())
    np.testing.assert_array_equal(flat(learner, rows), plain)


def test_changed_tensors_are_not_kept(learner: MegatronLearner) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def change(tensors: NamedTensors) -> NamedTensors:
        nonlocal most
        for name, tensor in tensors:
            made = tensor.clone()
            alive.append(weakref.ref(made))
            yield name, made
            most = max(most, sum(one() is not None for one in alive))

    with changed(learner, change):
        pass
    assert len(alive) > 10
    assert most <= 2


def test_a_change_that_loses_a_tensor_is_refused(learner: MegatronLearner) -> None:
    before = {name: tensor.clone() for name, tensor in learner.named_weights()}
    lost = f"{MODULE}.weight"

    def doubled(tensors: NamedTensors) -> NamedTensors:
        return ((name, 2.0 * tensor) for name, tensor in tensors if name != lost)

    with pytest.raises(ValueError, match=f"1 tensors never came, the first {lost}"), changed(learner, doubled):
        pass
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.named_weights())


def test_a_layer_is_scaled_with_all_its_matrices_and_without_its_norms(learner: MegatronLearner) -> None:
    with changed(learner, scaled("model.layers.1", 2.0)):
        twice = {name for name, tensor in learner.named_weights() if name.startswith("model.layers.1.")}
        norms = {name for name in twice if "norm" in name}
        inside = {name: tensor.clone() for name, tensor in learner.named_weights()}
    for name, tensor in learner.named_weights():
        expected = 2.0 if name in twice - norms else 1.0
        assert torch.equal(inside[name], expected * tensor), name


@pytest.mark.parametrize(
    ("expected", "change", "engine_map"),
    [
        (ALIKE, scaled(MODULE, 1.25), unchanged),
        pytest.param({"bf16:lm_head"}, rounded("lm_head", torch.bfloat16), unchanged, marks=pytest.mark.slow),
        pytest.param({f"full:{GROUP}"}, unchanged, lambda quant: quant.promoted([GROUP]), marks=pytest.mark.slow),
        pytest.param({"full:all"}, unchanged, lambda quant: quant.only(()), marks=pytest.mark.slow),
        pytest.param(
            {"format:fp8_tensor"},
            unchanged,
            lambda quant: quant.promoted(quant.formats, to="fp8_tensor"),
            marks=pytest.mark.slow,
        ),
        pytest.param({"weights_only"}, None, lambda quant: quant.only(()), marks=pytest.mark.slow),
    ],
)
def test_the_fault_of_an_engine_is_the_first_suspect(
    learner: MegatronLearner,
    rows: list[list[int]],
    quant: QuantMap,
    expected: set[str],
    change: Callable[[NamedTensors], NamedTensors] | None,
    engine_map: Callable[[QuantMap], QuantMap],
) -> None:
    """The engine is played by the learner with the fault."""
    with ExitStack() as fault:
        fault.enter_context(changed(learner, change or (lambda tensors: fake_quantize_state(tensors, quant))))
        served = engine_map(quant)
        fault.enter_context(emulated(learner, served if served.formats else None))
        engine = flat(learner, rows)
    with emulated(learner, quant):
        kernels = torch.from_numpy(flat(learner, rows) - engine)
    tried = effects(learner, lambda: flat(learner, rows), quant, None)
    found = suspects(kernels, {name: torch.from_numpy(effect) for name, effect in tried.items()})
    first, others = found[: len(expected)], found[len(expected) :]
    assert {suspect.name for suspect in first} == expected
    # A module's scale moves little here, beside the activations that it rounds to the other side.
    assert first[-1].explained > 0.6
    assert others[0].explained < first[-1].explained - 0.5


def test_the_probe_says_what_a_publish_moved_and_what_the_formats_cost(
    learner: MegatronLearner, rows: list[list[int]], quant: QuantMap
) -> None:
    fixed = tuple(map(tuple, rows))
    scorer = ProbeScorer(learner)
    first, measured = scorer.score(fixed, 0.4, quant)
    assert set(measured) == {"probe_quantization_nats", "probe_quantization_ess"}
    plain, formats = (np.concatenate([np.array(row) for row in side]) for side in (first.logprobs, first.quantized))
    assert measured["probe_quantization_nats"] == pytest.approx(np.abs(plain - formats).mean())
    assert 0.0 < measured["probe_quantization_nats"] < 0.1
    assert scorer.score(fixed, 0.4, quant)[1]["probe_staleness_nats"] == 0.0
    with changed(learner, scaled("lm_head", 1.5)):
        moved = scorer.score(fixed, 0.4, None)
        assert moved[1]["probe_staleness_nats"] > 1e-3
        assert moved[0].quantized == moved[0].logprobs
    assert scorer.score(fixed, 0.4, quant)[0] == first
