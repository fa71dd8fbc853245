"""How far an engine may be from the learner, by the precision of both."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.build import learner as building
from launch.build.learner import MAX_GAP_NATS, coarser_precision
from launch.convert.new_model import new_model
from megatron_bridge.weight_sync.disk import DiskChannel
from megatron_bridge.weight_sync.streaming import StreamedChannel
from pipeline.config.loader import recipe_from
from pipeline.data.run_directory import RunDirectory
from tests.support.runs import a_recipe


@pytest.mark.parametrize(
    ("rollout", "learner", "expected"),
    [
        ("fp32", dict(precision="fp32"), "fp32"),
        ("fp8_block", dict(precision="fp32"), "fp8_block"),
        ("bf16", dict(precision="fp8_delayed"), "fp8_tensor"),
        ("fp8_block", dict(precision="bf16", fp8_emulation=True), "bf16"),
        ("fp8_block", dict(precision="fp32", fp8_emulation=True), "bf16"),
        ("fp8_tensor", dict(precision="bf16", fp8_emulation=True), "fp8_tensor"),
        ("emulated_fp4", dict(precision="fp32"), "emulated_fp4"),
    ],
)
def test_emulated_block_fp8_is_held_to_the_bound_of_bf16(
    rollout: str, learner: dict[str, object], expected: str
) -> None:
    data = dict(
        run=dict(name="a", steps=1),
        model=dict(path="m"),
        task=dict(name="sort_digits"),
        rollout=dict(precision=rollout),
        learner=learner,
    )
    found = coarser_precision(recipe_from(data, source="t"))
    assert MAX_GAP_NATS[found] == MAX_GAP_NATS[expected]  # type: ignore[index]


def test_both_channels_compare_with_what_either_published_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise probe_staleness_nats spans several versions after a change of channel."""
    new_model(tmp_path / "model", hidden=32, ffn=32, head_dim=16)
    recipe = a_recipe(
        tmp_path,
        run=dict(name="run", steps=4),
        model=dict(path=str(tmp_path / "model")),
        rollout=dict(precision="fp8_block"),
        weights=dict(channel="broadcast"),
        controller=dict(),
    )
    probes: dict[type, Any] = {}

    def noted(self: Any, *arguments: Any, **_: Any) -> None:
        probes[type(self)] = arguments[5]

    for kind in (DiskChannel, StreamedChannel):
        monkeypatch.setattr(kind, "__init__", noted)
    monkeypatch.setattr(building, "build_fleet", lambda *_: None)
    monkeypatch.setattr(building, "fleet_settings", lambda *_: {})
    monkeypatch.setattr(building, "FleetUpdateSession", lambda *_, **__: None)
    monkeypatch.setattr(building, "build_weight_check_plan", lambda _recipe: None)
    learner: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    epoch: Any = None
    building.build_transition(RunDirectory(tmp_path / "run"), recipe, learner, epoch)
    assert set(probes) == {DiskChannel, StreamedChannel}
    assert probes[DiskChannel] is probes[StreamedChannel]
