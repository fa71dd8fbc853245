"""Checkpoints between Transformer Engine's layers and Megatron's own, and between FP8 and BF16 learners.

Transformer Engine is played: its name of a mixture's norm (see tests/golden/te_parameter_names.json) and its
`_extra_state`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import RowParallelLinear
from numpy.typing import NDArray

from launch.verify.layout_ranks import TEMPERATURE, train, weights
from launch.verify.layouts import write_model
from megatron_bridge.checkpoint import training_state
from megatron_bridge.checkpoint.dcp import CheckpointIndex
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.model.build import PolicyModel
from pipeline.config.recipe import LearnerPrecision, LearnerSection, OptimizerSection
from pipeline.errors import CorruptCheckpointError
from precision.objectives.p3o import P3O
from tests.support.learners import learner_here

OWN, FUSED = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "experts"
    write_model(folder, experts=True)
    return folder


@contextmanager
def learner(model: Path, precision: LearnerPrecision = "bf16", distributed: bool = True) -> Iterator[MegatronLearner]:
    section = LearnerSection(
        precision=precision,
        micro_batch_tokens=256,
        distributed_optimizer=distributed,
        optimizer=OptimizerSection(lr=1e-3, warmup_steps=0),
    )
    with learner_here(model, section, P3O(), temperature=TEMPERATURE, seed=0, total_steps=4) as created:
        yield created


def third_step(trained: MegatronLearner) -> NDArray[np.float64]:
    """What depends on weights, moments and step count: the weights after one more step."""
    train(trained, 2)
    return weights(trained)


def saved_after_two(model: Path, directory: Path, **settings: Any) -> NDArray[np.float64]:
    with learner(model, **settings) as trained:
        for step in range(2):
            train(trained, step)
        trained.save(directory)
        return third_step(trained)


def goes_on(model: Path, directory: Path, **settings: Any) -> NDArray[np.float64]:
    with learner(model, **settings) as trained:
        trained.load(directory)
        assert trained.step == 2
        return third_step(trained)


def play_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks name their norms in checkpoints as a model of Transformer Engine layers does."""
    original = PolicyModel.sharded_state_dict

    def renamed(self: PolicyModel, *arguments: Any, **named: Any) -> dict[str, Any]:
        found: dict[str, Any] = original(self, *arguments, **named)
        for entry in found.values():
            entry.key = entry.key.replace(OWN, FUSED)
        return found

    monkeypatch.setattr(PolicyModel, "sharded_state_dict", renamed)


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("first", ["transformer engine", "megatron"])
def test_layers_go_on_where_others_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, distributed: bool
) -> None:
    with monkeypatch.context() as patch:
        if first == "transformer engine":
            play_transformer_engine(patch)
        straight = saved_after_two(model, tmp_path / "saved", distributed=distributed)
    used = [name for name in (OWN, FUSED) if f"decoder.layers.{name}" in CheckpointIndex(tmp_path / "saved").tensors]
    assert used == [FUSED if first == "transformer engine" else OWN]
    if first == "megatron":
        play_transformer_engine(monkeypatch)
    assert np.array_equal(goes_on(model, tmp_path / "saved", distributed=distributed), straight)


def unpickled(_: Any, state: Any) -> None:
    assert state is None, "a pickle of a checkpoint was loaded"  # None: Megatron fills in what is missing


@pytest.fixture
def fp8_state(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Linear layers with a state beside their parameters, as Transformer Engine's have in FP8."""

    def state(_: Any) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps({"recipe": "DelayedScaling"})), dtype=torch.uint8)

    monkeypatch.setattr(RowParallelLinear, "get_extra_state", state)
    monkeypatch.setattr(RowParallelLinear, "set_extra_state", unpickled)
    return monkeypatch


def test_a_checkpoint_of_an_fp8_learner_is_one_of_bf16_too(
    model: Path, tmp_path: Path, fp8_state: pytest.MonkeyPatch
) -> None:
    straight = saved_after_two(model, tmp_path / "fp8")
    assert all(b"_extra_state" not in path.read_bytes() for path in (tmp_path / "fp8").iterdir())
    assert np.array_equal(goes_on(model, tmp_path / "fp8"), straight)
    fp8_state.undo()
    assert np.array_equal(goes_on(model, tmp_path / "fp8"), straight)


def test_an_fp8_learner_loads_one_of_bf16(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    straight = saved_after_two(model, tmp_path / "bf16")
    request.getfixturevalue("fp8_state")
    assert np.array_equal(goes_on(model, tmp_path / "bf16"), straight)


def test_generators_of_another_kind_of_device_are_left_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[Any] = []
    tracker = type(training_state.tensor_parallel.get_cuda_rng_tracker())
    monkeypatch.setattr(tracker, "set_states", lambda _, states: restored.append(states))
    monkeypatch.setattr(training_state, "_device", lambda: "cuda")
    straight = saved_after_two(model, tmp_path / "gpu")
    goes_on(model, tmp_path / "gpu")
    assert len(restored) == 1
    monkeypatch.setattr(training_state, "_device", lambda: "cpu")
    assert np.array_equal(goes_on(model, tmp_path / "gpu"), straight)
    assert len(restored) == 1


def test_weights_that_are_not_there_are_named(model: Path) -> None:
    with learner(model) as trained:
        chunk = trained.model[0].module
        state = dict(chunk.state_dict())
        training_state.fill(chunk, state)
        del state["decoder.layers.3.self_attention.linear_proj.weight"]
        with pytest.raises(
            CorruptCheckpointError, match=r"1 names .*, the first decoder\.layers\.3\.self_attention\.linear_proj"
        ):
            training_state.fill(chunk, state)


def state(groups: int, **found: Any) -> dict[str, Any]:
    steps = {name: value for name, value in found.items() if name == "step"}
    others = {name: value for name, value in found.items() if name != "step"}
    return {"optimizer": {"param_groups": [dict(lr=0.1, **steps) for _ in range(groups)], "state": {0: {}, **others}}}


def part(adam: Any, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(optimizer=adam, **more)


def test_steps_go_where_the_optimizer_keeps_them() -> None:
    """torch's Adam keeps them in each state, `common_step` for short; Transformer Engine's in each group."""
    ours = part(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    fused = part(SimpleNamespace())
    sharded = part(SimpleNamespace(), _init_optimizer_states_with_dummy_values=None)
    loaded = {0: state(2, step=7), 1: state(2, common_step=torch.tensor(7.0)), 2: state(1, step=7)}
    training_state._place_steps(SimpleNamespace(chained_optimizers=[ours, fused, sharded]), loaded)
    assert loaded == {
        0: state(2, common_step=torch.tensor(7.0)),
        1: state(2, step=7),
        2: state(1, step=7),
    }
    assert isinstance(loaded[1]["optimizer"]["param_groups"][0]["step"], int)
    float32 = state(1, step=7)["optimizer"]  # alone, and without a wrapping
    training_state._place_steps(SimpleNamespace(chained_optimizers=[ours]), float32)
    assert float32 == state(1, common_step=torch.tensor(7.0))["optimizer"]
