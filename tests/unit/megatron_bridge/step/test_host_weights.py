"""Ranking layer groups of a real learner with a planted bad layer: a few channels that dwarf all others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from launch.verify.layouts import write_model
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.step.host_weights import HostWeights, PinnedMemory, row_scorer
from megatron_bridge.step.micro_batches import TokenRows
from pipeline.config.recipe import LearnerSection
from precision.formats.quant_map import QuantMap
from precision.mismatch.sensitivity import promote_greedily, rank_groups
from precision.supervised import Supervised
from tests.support.learners import learner_here
from tests.support.outliers import plant_outlier_channels

BAD = {"model.layers.2.mlp.down_proj", "model.layers.2.mlp.gate_up_proj"}
"""Blocks of up_proj hold large rows beside small ones, too."""


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegatronLearner]:
    model = tmp_path_factory.mktemp("models") / "planted"
    write_model(model, experts=False)
    plant_outlier_channels(model, layer=2)
    with learner_here(
        model,
        LearnerSection(precision="fp32", step_deadline_s=60),
        Supervised(),
        temperature=1.0,
        seed=0,
        total_steps=1,
    ) as created:
        yield created


def rows(learner: MegatronLearner) -> TokenRows:
    random = np.random.default_rng(0)
    tokens = [random.integers(0, learner.model_config.vocab_size, 33).astype(np.int32) for _ in range(8)]
    return TokenRows(tokens=tokens, starts=np.ones(8, np.int64))


def test_a_planted_bad_layer_is_ranked_first_and_promoted_first(learner: MegatronLearner) -> None:
    score = row_scorer(learner, rows(learner))
    quant = QuantMap.for_decoder(learner.model_config.num_layers, "fp8_block")
    ranked = rank_groups(score, quant)
    assert {one.group.name for one in ranked[:2]} == BAD
    assert ranked[1].damage > 10 * ranked[2].damage
    promoted = sorted((one.promoted.k3, one.group.name) for one in ranked if one.promoted is not None)
    assert promoted[0][1] in BAD
    costs = {one.group.name: 1000 for one in ranked}
    found = promote_greedily(score, quant, ranked, ess_floor=1 - 20 * ranked[2].damage, extra_bytes=costs)
    assert found.reached
    assert {step.group.name for step in found.path[:2]} == BAD
    assert found.path[1].gap.k3 < found.start.k3 / 10


def test_scores_are_restored_and_empty_maps_change_nothing(learner: MegatronLearner) -> None:
    score = row_scorer(learner, rows(learner))
    plain = score(None)
    assert plain.shape == (8 * 32,)
    assert not torch.equal(score(QuantMap.for_decoder(4, "fp8_tensor")), plain)
    assert torch.equal(score(None), plain)
    assert torch.equal(score(QuantMap.for_decoder(4, None)), plain)


def test_a_learner_that_emulates_by_itself_is_scored_alike(learner: MegatronLearner) -> None:
    score, quant = row_scorer(learner, rows(learner)), QuantMap.for_decoder(4, "fp8_block")
    plain, quantized = score(None), score(quant)
    learner.emulate(quant)
    try:
        assert torch.equal(score(None), plain)
        assert torch.equal(score(quant), quantized)
    finally:
        learner.emulate(None)


def test_a_learner_that_trains_emulated_is_scored_plainly_all_the_same(learner: MegatronLearner) -> None:
    score, quant = row_scorer(learner, rows(learner)), QuantMap.for_decoder(4, "fp8_tensor")
    plain, emulated = score(None), score(quant)
    learner.emulate(quant)
    try:
        assert torch.equal(score(None), plain)
        assert torch.equal(score(quant), emulated)
        assert not torch.equal(plain, emulated)
    finally:
        learner.emulate(None)


class Copies(TorchDispatchMode):
    """Notes of every copy whether it may run behind the host's back."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.queued.append(args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


def test_a_swap_moves_each_parameter_twice_and_waits_for_nothing(learner: MegatronLearner) -> None:
    """In and back, again and again, with parameters of one shape in each other's memory."""
    parameters = [parameter.detach() for chunk in learner.model for parameter in chunk.parameters()]
    older, begun = [one.clone() for one in parameters], HostWeights(learner)
    try:
        for number, parameter in enumerate(parameters):
            parameter += number
        newer, copies = [one.clone() for one in parameters], Copies()
        for _ in range(3):
            with copies, begun.in_place():
                assert all(map(torch.equal, parameters, older))
            assert all(map(torch.equal, parameters, newer))
        begun.take()
        with begun.in_place():
            assert all(map(torch.equal, parameters, newer))
        assert copies.queued == [True] * (3 * 2 * 2 * len(parameters))
    finally:
        for parameter, value in zip(parameters, older, strict=True):
            parameter.copy_(value)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> PinnedMemory:
    """Blocks of 4 KiB."""

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **kinds: empty(*sizes, **kinds))
    return PinnedMemory(pinned=True, block_bytes=4096)


def test_tensors_have_memory_of_their_own(memory: PinnedMemory) -> None:
    kinds = [((3, 5), torch.float32), ((), torch.bfloat16), ((0, 4), torch.float32), ((7,), torch.uint8)] * 3
    made = [memory.empty(shape, dtype) for shape, dtype in kinds]
    for value, tensor in enumerate(made):
        tensor.fill_(value)
    for value, (tensor, (shape, dtype)) in enumerate(zip(made, kinds, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert bool((tensor == value).all())


def test_what_is_large_costs_no_second_of_itself(memory: PinnedMemory) -> None:
    """Seven times 9 KiB would be seven times 16 when each is rounded up."""
    sized = PinnedMemory(pinned=True, block_bytes=65536)
    for _ in range(7):
        sized.empty((9 * 1024,), torch.uint8)
    assert sized.num_bytes == 65536
    memory.empty((5000,), torch.uint8)
    memory.empty((3000,), torch.uint8)  # into what is left of the block of 8 KiB
    assert memory.num_bytes == 8192
