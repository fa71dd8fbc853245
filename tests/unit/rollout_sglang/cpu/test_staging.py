"""The second parameters of a CPU engine, and the rules by which they take the place of its own."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rollout_sglang.cpu import staging
from rollout_sglang.cpu.staging import exchange, shadow_of
from rollout_sglang.protocol import STAGE


class Layer(nn.Linear):
    """It derives a tensor from its weight after loading, as FP8 layers do, and has a loader of its own."""

    def __init__(self) -> None:
        super().__init__(3, 2, bias=False)
        self.weight.weight_loader = self.load  # type: ignore[assignment]
        self.derive()

    def load(self, parameter: nn.Parameter, value: Tensor) -> None:
        parameter.data.copy_(value)

    def derive(self) -> None:
        self.doubled = 2 * self.weight.data


class Model(nn.Module):
    """Head and embedding are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.head = nn.Linear(3, 2, bias=False)
        self.head.weight = self.first.weight
        self.register_buffer("angles", torch.ones(2))
        self.loads = threading.Semaphore(100)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, value in tensors:
            assert self.loads.acquire(timeout=10)
            own[name].weight_loader(own[name], value)


MODULE, _, NAME = staging._UPDATER.rpartition(".")


@dataclasses.dataclass(frozen=True)
class Updater:
    """As much of SGLang's WeightUpdater as staging calls."""

    get_model: Callable[[], Any]
    get_model_runner: Callable[[], Any]
    _model_update_group: dict[str, Any]

    def begin_weight_update(self) -> None:
        """Nothing was packed."""

    def load_weights_from_distributed(self, tensors: Any) -> tuple[bool, str]:
        try:
            self.get_model().load_weights(tensors)
        except KeyError as error:
            return False, f"no parameter {error}"
        return True, ""

    def end_weight_update(self, *, run_post_load: bool) -> None:
        for module in self.get_model().modules():
            if isinstance(module, Layer):
                module.derive()


Updater.__module__, Updater.__qualname__ = MODULE, NAME


class Checker:
    """As much of its WeightChecker."""

    def __init__(self, get_model: Callable[[], Any]) -> None:
        self._get_model = get_model

    def handle(self, action: str, *, role: str) -> dict[str, Any]:
        assert (action, role) == ("checksum", "target")
        named = self._get_model().named_parameters()
        return dict(checksums={name: hashlib.sha256(one.data.numpy().tobytes()).hexdigest() for name, one in named})

    def _parallelism_info(self, *, role: str) -> Any:
        return SimpleNamespace(model_dump=lambda: dict(role=role))


class Engine:
    """A runner, asked as SGLang's server would ask it."""

    def __init__(self) -> None:
        self.model = Model()
        self.weight_updater = Updater(lambda: self.model, lambda: self, {"group": object()})
        self._weight_checker = Checker(lambda: self.model)

    def check(self, action: str = "checksum") -> dict[str, str]:
        def original(runner: Engine, action: str, *, role: str) -> dict[str, Any]:
            return runner._weight_checker.handle(action, role=role)

        return dict(staging._check_weights(original, self, action, role="target")["checksums"])

    def stage(self, do: str, **what: str) -> dict[str, str]:
        return self.check(STAGE + json.dumps({"do": do, **what}))

    def staged(self, folder: Path) -> dict[str, str]:
        """Its state once nothing is pending."""
        state = self.stage("folder", folder=str(folder))
        while state["pending"] != "0":
            state = self.stage("wait")
        return state

    def load(self, folder: Path) -> str:
        """Which of the two ways took the folder."""
        took = staging._from_disk(lambda *_: (True, "loaded"), self.weight_updater, str(folder))
        return str(took[1])

    def values(self) -> dict[str, list[float]]:
        return {name: one.flatten().tolist() for name, one in self.model.named_parameters()}


def folder_of(path: Path, value: float, names: Iterable[str] = ("first.weight", "second.weight")) -> Path:
    path.mkdir()
    save_file({name: torch.full((2, 3), value) for name in names}, path / "model.safetensors")
    return path


def test_an_engine_serves_its_weights_until_the_staged_ones_take_their_place(tmp_path: Path) -> None:
    engine = Engine()
    before, held = engine.values(), engine.check()
    own = engine.model.second.weight
    folder = folder_of(tmp_path / "13", 7.0)
    assert engine.staged(folder)["failure"] == ""
    assert engine.values() == before
    assert engine.check() == held

    assert engine.load(folder) == "Succeeded to update model weights: they were staged."
    assert engine.values() == {"first.weight": [7.0] * 6, "second.weight": [7.0] * 6}
    assert engine.model.second.weight is own, "layers and loaders keep the parameter that they know"
    assert engine.model.second.doubled.flatten().tolist() == [14.0] * 6
    assert engine.check() == Checker(lambda: engine.model).handle("checksum", role="target")["checksums"]


def test_the_checksum_of_what_was_staged_answers_once(tmp_path: Path) -> None:
    engine = Engine()
    folder = folder_of(tmp_path / "13", 7.0)
    engine.staged(folder)
    engine.load(folder)
    staged = engine.check()
    engine.model.first.weight.data[0, 0] = 8.0
    assert engine.check() != staged, "a later check computes what the engine holds then"


@pytest.mark.parametrize("kind", ["folder", "tensors"])
def test_a_load_in_between_is_what_the_next_checksum_is_of(tmp_path: Path, kind: str) -> None:
    """Whoever staged died before it asked."""
    engine = Engine()
    folder = folder_of(tmp_path / "13", 7.0)
    engine.staged(folder)
    engine.load(folder)
    if kind == "folder":
        assert engine.load(tmp_path / "14") == "loaded"
    else:
        staging._forget_checksums(engine.weight_updater)
    engine.model.first.weight.data[0, 0] = 8.0
    assert engine.check() == Checker(lambda: engine.model).handle("checksum", role="target")["checksums"]


def test_a_release_that_loads_elsewhere_stages_nothing() -> None:
    engine = Engine()
    engine.weight_updater = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="cannot be staged"):
        engine.stage("begin")


def test_another_folder_than_the_staged_one_is_loaded(tmp_path: Path) -> None:
    engine = Engine()
    before = engine.values()
    engine.staged(folder_of(tmp_path / "13", 7.0))
    assert engine.load(tmp_path / "14") == "loaded"
    assert engine.values() == before


def test_what_was_staged_is_taken_once(tmp_path: Path) -> None:
    """A second order to load it comes after a check that failed: the weights of before must not come back."""
    engine = Engine()
    folder = folder_of(tmp_path / "13", 7.0)
    engine.staged(folder)
    engine.load(folder)
    assert engine.load(folder) == "loaded"
    assert engine.values()["first.weight"] == [7.0] * 6


def test_nothing_half_staged_is_taken(tmp_path: Path) -> None:
    engine = Engine()
    engine.model.loads = threading.Semaphore(1)
    before = engine.values()
    folder = folder_of(tmp_path / "13", 7.0)
    assert engine.stage("folder", folder=str(folder))["pending"] == "1"
    assert engine.load(folder) == "loaded"
    assert engine.values() == before
    engine.model.loads.release()


def test_a_failure_is_said_and_nothing_is_taken(tmp_path: Path) -> None:
    engine = Engine()
    before = engine.values()
    folder = folder_of(tmp_path / "13", 7.0, ["first.weight", "third.weight"])
    assert "no parameter 'third.weight'" in engine.staged(folder)["failure"]
    assert engine.load(folder) == "loaded"
    assert engine.values() == before


def test_an_update_that_hangs_writes_to_nothing_of_the_next(tmp_path: Path) -> None:
    engine = Engine()
    engine.model.loads = threading.Semaphore(1)
    engine.stage("folder", folder=str(folder_of(tmp_path / "13", 7.0)))
    overtaken = engine.__dict__["even_keel_staging"]
    next_folder = folder_of(tmp_path / "14", 9.0)
    engine.stage("begin")
    engine.model.loads.release(10)
    assert engine.staged(next_folder)["failure"] == ""
    overtaken._thread.join(10)
    assert engine.load(next_folder) != "loaded"
    assert engine.values()["first.weight"] == [9.0] * 6


def test_shared_parameters_stay_shared_and_buffers_are_the_models() -> None:
    model = Model()
    shadow = shadow_of(model)
    assert shadow.head.weight is shadow.first.weight
    assert shadow.first.weight is not model.first.weight
    assert shadow.angles is model.angles
    own, other = model.first.weight.data_ptr(), shadow.first.weight.data_ptr()
    exchange(model, shadow)
    assert (model.head.weight.data_ptr(), shadow.head.weight.data_ptr()) == (other, own)
