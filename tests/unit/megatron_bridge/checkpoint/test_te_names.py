"""Models of Transformer Engine layers, as ops/gpu/te_parameter_names.py recorded them, against both name maps.

The recording machine had Transformer Engine and no GPU: its constructors ran, its kernels did not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from megatron_bridge.checkpoint.dcp import StoredTensor, find_sources
from megatron_bridge.checkpoint.training_state import sharded_weights
from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.model.build import build_chunks
from megatron_bridge.parallel.layout import Layout, initialize
from megatron_bridge.weights import NameMap, ShardCoords
from tests.support.learners import leave_world
from tests.support.parameters import RankParameters, check_bijection

RECORDED = json.loads((Path(__file__).parents[3] / "golden" / "te_parameter_names.json").read_text())
CASES: list[Any] = [pytest.param(case, id=f"{case['model']} TP{case['tensor']}") for case in RECORDED["cases"]]


def held(case: dict[str, Any]) -> tuple[ModelConfig, list[RankParameters]]:
    config, size = ModelConfig.from_hf(case["config"]), case["tensor"]
    experts = {} if config.experts is None else dict(expert_size=size)
    ranks = []
    for rank, parameters in enumerate(case["ranks"]):
        coords = ShardCoords(
            tensor_rank=rank, tensor_size=size, **(dict(expert_rank=rank) if experts else {}), **experts
        )
        sizes = {NameMap(config).stage_name(name, [0, 1]): tuple(size) for name, size in parameters.items()}
        ranks.append(RankParameters(stage=0, coords=coords, sizes=sizes))
    return config, ranks


@pytest.mark.parametrize("case", CASES)
def test_parameters_hold_every_number_of_every_tensor_once(case: dict[str, Any]) -> None:
    config, ranks = held(case)
    assert len(ranks) == case["tensor"]
    assert check_bijection(config, ranks) == config.num_parameters


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_them_can_be_converted(case: dict[str, Any], tmp_path: Path) -> None:
    config = ModelConfig.from_hf(case["config"])
    stored = {name: StoredTensor(tuple(size), torch.bfloat16, ()) for name, size in case["stored"].items()}
    sources = find_sources(tmp_path, stored, config)
    assert sorted(name for source in sources for name in source.names) == sorted(config.tensors())


@pytest.fixture
def alone() -> Iterator[None]:
    initialize(Layout(), seed=0, deadline_s=30.0)
    yield
    leave_world()


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")
@pytest.mark.parametrize("case", [case for case in RECORDED["cases"] if case["tensor"] == 1], ids=lambda c: c["model"])
def test_megatrons_own_layers_store_the_same_tensors(case: dict[str, Any]) -> None:
    chunks = build_chunks(ModelConfig.from_hf(case["config"]), Layout(), torch.bfloat16, 1.0, layers="megatron")
    sharded = sharded_weights(chunks, case["stored"])
    apply_factories(sharded)
    found = {one.key: list(one.global_shape) for one in nested_values(sharded) if isinstance(one, ShardedTensor)}
    assert found == case["stored"]
