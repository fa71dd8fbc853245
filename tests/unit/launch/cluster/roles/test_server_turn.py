"""Engines take a new quant map one after the other, and never all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cluster.roles.server_turn import reason_to_start_again
from pipeline.config.recipe import Recipe
from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.membership import Member
from pipeline.data.quant_maps import digest_of, write_quant_map
from pipeline.data.run_directory import RunDirectory, unfenced
from pipeline.errors import EngineVersionError
from precision.controller.records import Evidence, State
from precision.formats.quant_map_file import QuantMapFile
from rollout_sglang.target import Target

OLD, NEW = QuantMapFile(base="fp8_block"), QuantMapFile(base="fp8_block", exceptions={"model.layers.0.x": "full"})
OLD_MAP, NEW_MAP = digest_of(OLD), digest_of(NEW)


def recipe(engines: int, **sections: object) -> Recipe:
    data: dict[str, object] = dict(
        run=dict(name="x", steps=3),
        model=dict(path="m"),
        task=dict(name="sort_digits"),
        rollout=dict(engines=engines, precision="fp8_block"),
        controller=dict(ess_floor=0.9),
    )
    return Recipe.model_validate(data | sections)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """The newest policy has the new map."""
    directory = RunDirectory(tmp_path)
    directory.policy_directory(4).mkdir(parents=True)
    write_quant_map(directory.policy_directory(4), NEW)
    directory.set_published(4)
    return directory


def announce(run: RunDirectory, *maps: str) -> list[Member]:
    members = [Member(index, f"http://{index}", 1, name) for index, name in enumerate(maps)]
    for member in members:
        if member.quant_map:
            run.membership().announce(member)
    return members


def whose_turn(run: RunDirectory, *maps: str, serving: bool = True, engines: int = 3) -> list[int]:
    members = announce(run, *maps)
    wants = [reason_to_start_again(run, recipe(engines), member, lambda _: serving) for member in members]
    return [member.index for member, why in zip(members, wants, strict=True) if why and member.quant_map]


def test_one_after_the_other(run: RunDirectory) -> None:
    assert whose_turn(run, OLD_MAP, OLD_MAP, OLD_MAP) == [0]
    run.membership().withdraw(Member(0, "http://0", 1, OLD_MAP))
    assert whose_turn(run, "", OLD_MAP, OLD_MAP) == [], "while engine 0 starts, no other one stops"
    assert whose_turn(run, NEW_MAP, OLD_MAP, OLD_MAP) == [1]
    assert whose_turn(run, NEW_MAP, NEW_MAP, OLD_MAP) == [2]
    assert whose_turn(run, NEW_MAP, NEW_MAP, NEW_MAP) == []


def test_never_the_last_one_that_serves(run: RunDirectory) -> None:
    assert whose_turn(run, OLD_MAP, OLD_MAP, OLD_MAP, serving=False) == []
    for index in (1, 2):
        run.membership().withdraw(Member(index, f"http://{index}", 1, OLD_MAP))
    assert whose_turn(run, OLD_MAP) == []
    assert whose_turn(run, OLD_MAP, engines=1) == [0], "a run of one engine waits for it"


def test_the_suspected_start_of_an_engine_is_started_again_once(run: RunDirectory) -> None:
    members = announce(run, NEW_MAP, NEW_MAP)
    record = ControlRecord(step=0, evidence=Evidence(step=0, loss=1.0), state=State(), restarts={1: 1})
    ControlFiles(run.control, unfenced).create(record)
    wants = [reason_to_start_again(run, recipe(2), member, lambda _: True) for member in members]
    assert wants[0] is None
    assert "ESS of its tokens" in str(wants[1])
    assert reason_to_start_again(run, recipe(2), Member(1, "http://1", 2, NEW_MAP), lambda _: True) is None
    assert reason_to_start_again(run, recipe(2, controller=None), members[1], lambda _: True) is None


def test_each_engine_gets_the_weights_in_its_own_formats(run: RunDirectory) -> None:
    folder = run.policy_directory(4)
    target = Target(4, folder, None)
    old, new = (Member(0, "http://0", 1, name) for name in (OLD_MAP, NEW_MAP))
    assert target.of_map(new) is target
    assert target.of_map(Member(0, "http://0")) is target, "an engine that announces no map"
    with pytest.raises(EngineVersionError, match="started with quant map"):
        target.of_map(old)
    older = folder / "maps" / OLD_MAP
    older.mkdir(parents=True)
    assert target.of_map(old).directory == older
