"""What the controller of a run may do and measure."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from launch.build import engines
from launch.build.components import build_quant_map
from launch.build.control import EmulationMeter, build_ladder, older_maps, rows_of
from launch.convert.new_model import new_model
from pipeline.config.loader import recipe_from
from pipeline.config.recipe import Recipe
from pipeline.data.membership import Member
from pipeline.data.quant_maps import NumberedMaps, digest_of
from pipeline.data.run_directory import RunDirectory, unfenced
from pipeline.data.share import Share
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import RolloutFormat
from tests.support.batches import batch_of_rewards


class Learner:
    """One rank, as far as it is asked here."""

    emulation = None

    def __init__(self, layers: str = "megatron") -> None:
        self.layers = layers

    def tell(self, action: Callable[[], Any]) -> Any:
        return action()


def recipe_of(folder: Path, **sections: Any) -> Recipe:
    if not (folder / "model").exists():
        new_model(folder / "model", hidden=32, ffn=32, head_dim=16)
    data = dict(
        run=dict(name="run", root=str(folder), steps=4),
        model=dict(path=str(folder / "model")),
        task=dict(name="sort_digits"),
        rollout=dict(precision="fp8_block"),
        controller=dict(),
    )
    return recipe_from(data | sections, source="test")


def test_formats_that_the_learner_follows_are_not_changed(tmp_path: Path) -> None:
    assert build_ladder(recipe_of(tmp_path)).groups
    assert build_ladder(recipe_of(tmp_path, learner=dict(fp8_emulation=True))).groups == ()


def test_engines_on_the_learner_s_gpus_are_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, weights=dict(channel="ipc"))
    ladder = build_ladder(recipe)
    assert ladder.groups
    assert ladder.engines_may_restart
    monkeypatch.setattr(engines, "has_cuda", lambda: True)
    ladder = build_ladder(recipe)
    assert (ladder.groups, ladder.engines_may_restart) == ((), False)


def test_with_transformer_engine_layers_nothing_is_measured() -> None:
    base = QuantMap.for_decoder(2, RolloutFormat.FP8_BLOCK)
    meter = EmulationMeter(Learner("transformer_engine"), base, 64)  # type: ignore[arg-type]
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
    older = older_maps(run, recipe, Learner())  # type: ignore[arg-type]
    assert older(newest) == [base], "it may have been announced a moment ago"
    when = time.time() - recipe.rollout.start_deadline_s - 1
    os.utime(run.membership().folder, (when, when))
    assert older(newest) == []
    monkeypatch.setattr("launch.build.control.look_with", lambda key: lambda member: "unverified")
    assert older_maps(run, recipe, Learner())(newest) == [base], "it answers"  # type: ignore[arg-type]


def test_rows_to_measure_are_the_same_from_shares_as_from_the_whole_batch() -> None:
    batch = batch_of_rewards([[1.0, 0.0]] * 6, seed=2)
    told: list[Any] = []

    def sum_of_shares(values: Any) -> Any:
        told.append(values)
        return sum(told)

    learner: Any = SimpleNamespace(sum_of_shares=sum_of_shares)
    expected, chosen = rows_of(batch, 30, learner)
    assert not told
    ranks = np.arange(batch.num_samples) // 3 % 2
    for rank in range(2):
        share = replace(batch.hold(Share(ranks=ranks, rank=rank)), loss_mask=batch.loss_mask)
        found, marked = rows_of(share, 30, learner)
        assert torch.equal(marked, chosen)
    assert found == expected
