"""Which role runs on which node: sizes of a recipe, first fit, and what moves when a node is gone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.run.starter import NoRoomError, Unit
from launch.schedulers.slurm.placement import Shape, place
from pipeline.config.loader import load_recipe
from pipeline.errors import RecipeError

NODES = [f"n{index}" for index in range(16)]


def shape(*overrides: str, gpus: int = 8, learner_nodes: int | None = None) -> Shape:
    return Shape.of(load_recipe(Path("qwen3_32b"), overrides), gpus, learner_nodes)


@pytest.mark.parametrize(
    ("overrides", "gpus", "learner_nodes", "nodes"),
    [
        ([], 8, None, 8),  # 32 learner GPUs and 8 engines of 4
        (["learner.data_parallel=1", "rollout.engines=4"], 8, None, 4),
        (["learner.data_parallel=1", "rollout.engines=3"], 8, None, 4),  # half a node stays free
        (
            ["rollout.engines=2", "rollout.tensor_parallel=16", "rollout.precision=bf16"],
            8,
            None,
            8,
        ),  # each engine over two nodes
        (["rollout.engines=1"], 4, None, 9),
        ([], 0, None, 1),
        ([], 0, 2, 2),
    ],
)
def test_the_recipe_says_how_many_nodes(overrides: list[str], gpus: int, learner_nodes: int | None, nodes: int) -> None:
    assert shape(*overrides, gpus=gpus, learner_nodes=learner_nodes).num_nodes == nodes


def test_a_teacher_that_would_have_no_gpu_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"distillation.path is teacher: .* no GPU .*distillation.urls"):
        shape("distillation={path: teacher}")
    assert shape("distillation={path: teacher}", gpus=0).num_nodes == 1


@pytest.mark.parametrize(
    ("overrides", "gpus", "learner_nodes", "message"),
    [
        (["learner.data_parallel=1"], 6, None, "the learner's 16 processes do not divide among 3 nodes"),
        ([], 8, 2, "the learner's 32 processes do not divide among 2 nodes of 8 GPUs"),
        (["rollout.tensor_parallel=9"], 8, None, "rollout.tensor_parallel 9 does not divide among 2 nodes"),
        (["weights.channel=ipc"], 8, None, "weights.channel is ipc"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    overrides: list[str], gpus: int, learner_nodes: int | None, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        shape(*overrides, gpus=gpus, learner_nodes=learner_nodes)


def test_the_32b_recipe_on_eight_nodes() -> None:
    placed = place(shape(), NODES[:9], {})
    learner = [placed[Unit("learner", node=node)] for node in range(4)]
    engines = Counter(placed[Unit("engine", index)] for index in range(8))
    assert learner == NODES[:4]
    assert engines == {node: 2 for node in NODES[4:8]}
    assert placed[Unit("collector")] == placed[Unit("router")] == "n0"
    assert "n8" not in placed.values()  # the spare one


def test_without_gpus_the_learner_is_spread_and_the_others_stay_with_it() -> None:
    two = shape("rollout.engines=3", gpus=0, learner_nodes=2)
    placed = place(two, NODES[:3], {})
    assert (placed[Unit("learner", node=0)], placed[Unit("learner", node=1)]) == ("n0", "n1")
    assert Counter(placed[Unit("engine", index)] for index in range(3)) == {"n0": 2, "n1": 1}
    moved = place(two, ["n0", "n2"], placed)
    assert moved[Unit("learner", node=1)] == moved[Unit("engine", 1)] == "n2"
    with pytest.raises(NoRoomError):
        place(two, ["n0"], placed)


@given(
    engines=st.integers(1, 12),
    tensor_parallel=st.sampled_from([1, 2, 4, 8, 16]),
    data_parallel=st.integers(1, 4),
    dead=st.integers(0, 8),
)
def test_no_node_is_given_more_than_it_has(engines: int, tensor_parallel: int, data_parallel: int, dead: int) -> None:
    asked = shape(
        f"rollout.engines={engines}",
        f"rollout.tensor_parallel={tensor_parallel}",
        f"learner.data_parallel={data_parallel}",
    )
    nodes = [f"n{index}" for index in range(asked.num_nodes + 1)]
    before = place(asked, nodes, {})
    gone = nodes[min(dead, len(nodes) - 1)]
    after = place(asked, [node for node in nodes if node != gone], before)
    for placed in (before, after):
        used = Counter[str]()
        for unit, node in placed.items():
            used[node] += asked.gpus(unit)
        assert set(placed) == set(asked.units())
        assert max(used.values()) <= 8
    assert all(after[unit] == node for unit, node in before.items() if node != gone)
