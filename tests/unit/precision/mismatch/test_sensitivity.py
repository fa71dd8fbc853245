"""Ranking and promoting layer groups, on scores whose errors are known by construction."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from precision.formats.quant_map import QuantMap
from precision.mismatch.sensitivity import layer_groups, promote_greedily, rank_groups

NUM_TOKENS = 4000
QUANT = QuantMap.for_decoder(3, "fp8_block")
NAMES = [group.name for group in layer_groups(QUANT)]


class PlantedErrors:
    """Logprobs to which every quantized group adds an error of its own, independent of the others'."""

    def __init__(self, sizes: dict[str, float]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.errors = {
            group.modules[0]: sizes.get(group.name, 0.01) * torch.randn(NUM_TOKENS, generator=generator).double()
            for group in layer_groups(QUANT)
        }
        self.calls = 0

    def __call__(self, quant_map: QuantMap | None) -> Tensor:
        self.calls += 1
        logprobs = torch.full((NUM_TOKENS,), -3.0, dtype=torch.float64)
        for first, error in self.errors.items():
            if quant_map is not None and first in quant_map.formats:
                logprobs = logprobs - error
        return logprobs


DOWN, QKV = "model.layers.1.mlp.down_proj", "model.layers.2.self_attn.qkv_proj"


def test_groups_are_what_engines_stack() -> None:
    assert len(NAMES) == 3 * 4
    assert NAMES[:4] == [
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
    ]
    assert sorted(m for group in layer_groups(QUANT) for m in group.modules) == sorted(QUANT.formats)


def test_the_planted_groups_come_first_and_their_figures_are_those_planted() -> None:
    score = PlantedErrors({DOWN: 0.2, QKV: 0.1})
    ranked = rank_groups(score, QUANT)
    assert [one.group.name for one in ranked[:2]] == [DOWN, QKV]
    assert score.calls == 1 + 2 * len(NAMES)
    # Lognormal ratios: k3 = s^2 / 2 and ESS = exp(-s^2), up to sampling error.
    assert ranked[0].alone.k3 == pytest.approx(0.02, rel=0.1)
    assert ranked[0].alone.ess == pytest.approx(0.9608, abs=0.005)
    everything_else = 0.1**2 + 10 * 0.01**2
    assert ranked[0].promoted.k3 == pytest.approx(everything_else / 2, rel=0.1)


def test_the_path_stops_at_the_floor_and_reports_the_whole_map() -> None:
    score = PlantedErrors({DOWN: 0.2, QKV: 0.15})
    first_half = torch.arange(NUM_TOKENS) < NUM_TOKENS // 2
    ranked = rank_groups(score, QUANT, chosen=first_half)
    costs = dict.fromkeys(NAMES, 1000)
    found = promote_greedily(score, QUANT, ranked, ess_floor=0.99, extra_bytes=costs, held_out=~first_half)
    assert found.reached
    assert [step.group.name for step in found.path] == [DOWN, QKV]
    assert found.start.ess < found.path[0].gap.ess < 0.99 <= found.gap.ess
    assert found.gap.num_tokens == NUM_TOKENS // 2
    left = set(QUANT.formats) - {DOWN} - set(layer_groups(QUANT)[8].modules)
    assert set(found.quant_map.formats) == left


def test_a_cheap_group_comes_before_a_dear_one_of_equal_damage() -> None:
    score = PlantedErrors({DOWN: 0.2, QKV: 0.2})
    costs = dict.fromkeys(NAMES, 1000) | {DOWN: 100_000}
    found = promote_greedily(score, QUANT, rank_groups(score, QUANT), ess_floor=0.97, extra_bytes=costs)
    assert found.path[0].group.name == QKV


def test_a_map_that_holds_the_floor_is_left_alone() -> None:
    score = PlantedErrors({})
    found = promote_greedily(
        score, QUANT, rank_groups(score, QUANT), ess_floor=0.98, extra_bytes=dict.fromkeys(NAMES, 1)
    )
    assert (found.path, found.reached, found.quant_map) == ((), True, QUANT)


def test_a_floor_of_one_promotes_everything() -> None:
    score = PlantedErrors({})
    ranked = rank_groups(score, QUANT)
    found = promote_greedily(score, QUANT, ranked, ess_floor=1.0, extra_bytes=dict.fromkeys(NAMES, 1))
    assert len(found.path) == len(NAMES)
    assert not found.quant_map.formats
    assert found.gap.ess == pytest.approx(1.0)
