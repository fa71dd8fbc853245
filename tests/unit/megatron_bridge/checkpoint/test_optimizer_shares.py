"""Each data parallel rank saves its own share of the optimizer's state, and any layout loads it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launch.convert.new_model import new_model
from launch.verify.layout_ranks import TEMPERATURE, train, weights
from megatron_bridge.checkpoint.dcp import CheckpointIndex
from megatron_bridge.checkpoint.training_state import boxes_of_range
from precision.objectives.p3o import P3O
from tests.support.checkpoint_ranks import save_both_forms, section
from tests.support.learners import learner_here
from tests.support.ranks import run_ranks

SIZES: dict[str, Any] = dict(hidden=64, layers=3, heads=4, kv_heads=2, head_dim=16, ffn=512)
SLACK = 1.2
"""States of random generators, and what torch works with beside the tensors of a small model."""


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_hold_a_range_in_its_order(shape: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, math.prod(shape)))
    stop = data.draw(st.integers(start, math.prod(shape)))
    boxes = list(boxes_of_range(tuple(shape), start, stop))
    inside = (itertools.product(*map(range, begin, map(sum, zip(begin, size, strict=True)))) for begin, size in boxes)
    found = list(itertools.chain.from_iterable(inside))
    assert found == list(itertools.product(*map(range, shape)))[start:stop]
    assert len(boxes) <= 2 * len(shape) - 1


@pytest.fixture(scope="module", params=["dense", "experts"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, int]]]:
    folder = tmp_path_factory.mktemp(request.param)
    experts = request.param == "experts"
    new_model(folder / "model", **SIZES | (dict(experts=4, experts_per_token=2, expert_ffn=128) if experts else {}))
    return folder, run_ranks(2, save_both_forms, folder / "model", folder, dict(data_parallel=2))


def test_a_save_takes_the_memory_of_the_rank_s_own_share(saved: tuple[Path, list[dict[str, int]]]) -> None:
    """2 + 6 bytes a parameter on the one of two that writes the weights too, 6 on the other. In loading, a whole tensor
    of the file is there beside the share."""
    _, ranks = saved
    for found in ranks:
        assert found["saving"] <= SLACK * (found["weights"] + found["optimizer"])
        assert found["loading"] <= SLACK * (found["optimizer"] + ranks[0]["weights"])
    assert ranks[0]["optimizer"] == pytest.approx(ranks[1]["optimizer"], rel=0.01)


def test_tensors_are_those_that_megatron_would_gather(saved: tuple[Path, list[dict[str, int]]]) -> None:
    folder, _ = saved
    gathered, shared = CheckpointIndex(folder / "gathered"), CheckpointIndex(folder / "shared")
    assert gathered.tensors.keys() == shared.tensors.keys()
    assert any("optimizer.state.exp_avg_sq." in name for name in shared.tensors)
    cut = 0
    for name, tensor in gathered.tensors.items():
        assert (tensor.shape, tensor.dtype) == (shared.tensors[name].shape, shared.tensors[name].dtype)
        assert torch.equal(gathered.read(name), shared.read(name)), name
        cut += len(shared.tensors[name].boxes) > len(tensor.boxes)
    assert cut >= 3, "a main copy and two moments at least lie on both ranks"


def test_another_layout_goes_on_from_either(saved: tuple[Path, list[dict[str, int]]]) -> None:
    folder, _ = saved
    ends = []
    for form in ("gathered", "shared"):
        with learner_here(
            folder / "model", section(), P3O(), temperature=TEMPERATURE, seed=0, total_steps=4
        ) as learner:
            learner.load(folder / form)
            assert learner.step == 1
            train(learner, 1)
            ends.append(weights(learner))
    assert (ends[0] == ends[1]).all()
