"""Engines take a new quant map one after the other, and never all at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch.roles.engine import reason_to_start_again
from pipeline.config.recipe import Recipe
from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.epochs import claim
from pipeline.data.membership import Member
from pipeline.data.quant_maps import QUANT_MAP_FILE, digest_of, write_quant_map
from pipeline.data.run_directory import RunDirectory, unfenced
from pipeline.errors import EngineVersionError
from pipeline.ports.weights import WeightCheck
from precision.controller.policy import Evidence, State
from precision.formats.quant_map import QuantMapFile
from rollout_sglang.fleet import Target

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


def whose_turn(
    run: RunDirectory,
    *maps: str,
    serving: bool = True,
    engines: int = 3,
    unverified: int | None = None,
    gone: int | None = None,
    quiet: bool = False,
) -> list[int]:
    """Engines that start again. Engine `unverified` has not been verified yet, `gone` does not answer. `quiet`: nothing
    was heard of any start for longer than a start may take."""

    def look(member: Member) -> str | None:
        name = "4" if serving and member.index != unverified else "unverified-4"
        return None if member.index == gone else name

    members = announce(run, *maps)
    for folder in (run.membership().folder, *(run.path / "epochs").glob("engine-*")) if quiet else ():
        when = time.time() - recipe(3).rollout.start_deadline_s - 1
        os.utime(folder, (when, when))
    wants = [reason_to_start_again(run, recipe(engines), member, look) for member in members if member.index != gone]
    there = [member.index for member in members if member.index != gone]
    return [index for index, why in zip(there, wants, strict=True) if why and maps[index]]


def test_one_after_the_other(run: RunDirectory) -> None:
    assert whose_turn(run, OLD_MAP, OLD_MAP, OLD_MAP) == [0]
    run.membership().withdraw(Member(0, "http://0", 1, OLD_MAP))
    assert whose_turn(run, "", OLD_MAP, OLD_MAP) == [], "while engine 0 starts, no other one stops"
    assert whose_turn(run, NEW_MAP, OLD_MAP, OLD_MAP) == [1]
    assert whose_turn(run, NEW_MAP, NEW_MAP, OLD_MAP) == [2]
    assert whose_turn(run, NEW_MAP, NEW_MAP, NEW_MAP) == []


def test_the_next_one_waits_until_the_one_before_is_verified(run: RunDirectory) -> None:
    assert whose_turn(run, NEW_MAP, OLD_MAP, OLD_MAP, unverified=0) == []
    assert whose_turn(run, NEW_MAP, OLD_MAP, OLD_MAP, unverified=0, quiet=True) == [], "however long that takes"


@pytest.mark.parametrize("announced", [OLD_MAP, ""], ids=["announced for ever", "nobody starts it again"])
def test_an_engine_that_is_lost_is_not_waited_for(run: RunDirectory, announced: str) -> None:
    assert whose_turn(run, announced, OLD_MAP, OLD_MAP, gone=0) == [], "it may be starting"
    assert whose_turn(run, announced, OLD_MAP, OLD_MAP, gone=0, quiet=True) == [1]
    assert whose_turn(run, announced, NEW_MAP, OLD_MAP, gone=0, quiet=True) == [2]
    claim(run.path, "engine", 0)
    assert whose_turn(run, announced, NEW_MAP, OLD_MAP, gone=0) == [], "it is being started"


def test_a_policy_folder_that_is_being_deleted_is_no_new_map(run: RunDirectory) -> None:
    (run.policy_directory(4) / QUANT_MAP_FILE).unlink()
    assert whose_turn(run, OLD_MAP, OLD_MAP) == []


def test_never_the_last_one_that_serves(run: RunDirectory) -> None:
    assert whose_turn(run, OLD_MAP, OLD_MAP, OLD_MAP, serving=False) == []
    for index in (1, 2):
        run.membership().withdraw(Member(index, f"http://{index}", 1, OLD_MAP))
    assert whose_turn(run, OLD_MAP) == []
    assert whose_turn(run, OLD_MAP, engines=1) == [0], "a run of one engine waits for it"


def test_the_suspected_start_of_an_engine_is_started_again_once(run: RunDirectory) -> None:
    members = announce(run, NEW_MAP, NEW_MAP)
    record = ControlRecord(step=3, evidence=Evidence(step=3, loss=1.0), state=State(), restarts={1: 1})
    ControlFiles(run.control, unfenced).create(record)
    wants = [reason_to_start_again(run, recipe(2), member, lambda _: "4") for member in members]
    assert wants[0] is None
    assert "ESS of its tokens" in str(wants[1])
    assert reason_to_start_again(run, recipe(2), Member(1, "http://1", 2, NEW_MAP), lambda _: "4") is None
    assert reason_to_start_again(run, recipe(2, controller=None), members[1], lambda _: "4") is None


def test_a_look_without_news_reads_no_other_engine_and_lists_no_records(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand engines look every ten seconds: a thousand files each would be 100,000 a second."""
    files = ControlFiles(run.control, unfenced)
    for step in range(3, 6):  # a stage of several steps: those after the published version are decided, too
        files.create(ControlRecord(step=step, state=State(), restarts={1: step}))
    members = announce(run, NEW_MAP, NEW_MAP)
    opened, listed = list[Path](), list[Path]()

    def noted(paths: list[Path], real: Callable[..., Any], path: Path, *rest: Any) -> Any:
        paths.append(Path(path))
        return real(path, *rest)

    for name, paths in (("open", opened), ("listdir", listed)):
        monkeypatch.setattr(os, name, partial(noted, paths, getattr(os, name)))
    assert reason_to_start_again(run, recipe(2), members[0], lambda _: "4") is None
    monkeypatch.undo()
    assert run.control / "000005.json" in opened
    assert run.membership().folder not in {path.parent for path in opened}
    assert run.control not in listed
    suspected = Member(1, "http://1", 5, NEW_MAP)
    assert "ESS of its tokens" in str(reason_to_start_again(run, recipe(2), suspected, lambda _: "4"))


def test_of_many_engines_the_one_just_before_is_asked_first(run: RunDirectory) -> None:
    members, asked = announce(run, NEW_MAP, NEW_MAP, OLD_MAP, OLD_MAP), list[int]()

    def look(member: Member) -> str:
        asked.append(member.index)
        return "4"

    assert reason_to_start_again(run, recipe(4), members[3], look) is None
    assert asked == [], "the announcement of engine 2 says that it has yet to start again"


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
    WeightCheck(version=4).save(older)
    assert target.of_map(old).directory == older
