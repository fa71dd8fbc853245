"""What a decision of the controller changes beside the engines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.build.components import build_quant_map
from launch.build.control import EmulationMeter, build_controller, older_maps
from launch.convert.new_model import new_model
from pipeline.config.loader import recipe_from
from pipeline.data.event_log import EventLog
from pipeline.data.membership import Member
from pipeline.data.quant_maps import NumberedMaps, digest_of
from pipeline.data.run_directory import RunDirectory, unfenced
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import RolloutFormat
from tests.support.batches import batch_of_rewards


class Learner:
    """What build_controller asks of one rank."""

    def __init__(self, quant_map: QuantMap | None, layers: str = "megatron") -> None:
        self.layers = layers
        self.emulation = None if quant_map is None else SimpleNamespace(quant_map=quant_map)

    def tell(self, action: Callable[[], Any]) -> Any:
        return action()

    def emulate(self, quant_map: QuantMap) -> None:
        self.emulation = SimpleNamespace(quant_map=quant_map)


@pytest.mark.parametrize("emulated", [True, False])
def test_a_learner_that_emulates_follows_the_engines_to_another_map(tmp_path: Path, emulated: bool) -> None:
    new_model(tmp_path / "model", hidden=32, ffn=32, head_dim=16)
    data = dict(
        run=dict(name="run", root=str(tmp_path), steps=4),
        model=dict(path=str(tmp_path / "model")),
        task=dict(name="sort_digits"),
        rollout=dict(precision="fp8_block"),
        learner=dict(fp8_emulation=emulated),
        controller=dict(),
    )
    recipe = recipe_from(data, source="test")
    run, base = RunDirectory(recipe.directory), build_quant_map(recipe)
    assert base is not None
    learner = Learner(base if emulated else None)
    run.freeze(recipe)
    controller = build_controller(run, recipe, learner, None, EventLog(run.path, "learner"))  # type: ignore[arg-type]
    assert controller is not None
    name = "model.layers.1.mlp.down_proj"
    controller.use_map(1, (name,))
    assert (learner.emulation is not None) == emulated
    if learner.emulation is not None:
        assert learner.emulation.quant_map == base.promoted((name,)) != base
        before = learner.emulation
        controller.use_map(1, (name,))
        assert learner.emulation is before, "nothing is rounded anew for the same map"


def test_with_transformer_engine_layers_nothing_is_measured() -> None:
    base = QuantMap.for_decoder(2, RolloutFormat.FP8_BLOCK)
    meter = EmulationMeter(Learner(None, "transformer_engine"), base, 64)  # type: ignore[arg-type]
    given = batch_of_rewards([[1.0, 0.0]])
    assert meter.term(given, ()) is None
    assert meter.groups(given, tuple(base.groups)) is None


def test_a_lost_engine_s_map_is_published_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_model(tmp_path / "model", hidden=32, ffn=32, head_dim=16)
    recipe = recipe_from(
        dict(
            run=dict(name="run", root=str(tmp_path), steps=4),
            model=dict(path=str(tmp_path / "model")),
            task=dict(name="sort_digits"),
            rollout=dict(precision="fp8_block", engines=2),
            controller=dict(),
        ),
        source="test",
    )
    run, base = RunDirectory(recipe.directory), build_quant_map(recipe)
    assert base is not None
    run.freeze(recipe)
    NumberedMaps(run.quant_maps, unfenced).write(0, base.to_file())
    newest = digest_of(base.promoted(("model.layers.1.mlp.down_proj",)).to_file())
    for member in (
        Member(0, "http://127.0.0.1:9", 1, newest),
        Member(1, "http://127.0.0.1:9", 1, digest_of(base.to_file())),
    ):
        run.membership().announce(member)
    older = older_maps(run, recipe, Learner(base))  # type: ignore[arg-type]
    assert older(newest) == [base], "it may have been announced a moment ago"
    when = time.time() - recipe.rollout.start_deadline_s - 1
    os.utime(run.membership().folder, (when, when))
    assert older(newest) == []
    monkeypatch.setattr("launch.build.control.look_with", lambda key: lambda member: "unverified")
    assert older_maps(run, recipe, Learner(base))(newest) == [base], "it answers"  # type: ignore[arg-type]
