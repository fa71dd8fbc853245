"""Engines are announced in files of their own, and those files are read only when something has changed."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.data import files, membership
from pipeline.data.membership import Announcement, Listed, Member, Membership
from tests.support.files import empty_for

FIRST, SECOND = Member(0, "http://n1:1", 3), Member(1, "http://n2:1", 1)


@pytest.fixture
def members(tmp_path: Path) -> Membership:
    return Membership(tmp_path / "engines")


def test_a_start_that_hangs_is_the_same_start(members: Membership) -> None:
    hung = replace(FIRST, silent="its process 7 is stopped")
    assert hung == FIRST
    members.announce(hung)
    [found] = members.engines()
    assert found.silent == "its process 7 is stopped"
    assert members.lists(FIRST)
    members.withdraw(FIRST)
    assert members.engines() == []


@pytest.mark.parametrize("damage", ["[1]", '{"url": "ftp://', ""])
def test_a_damaged_announcement_hides_its_own_engine_alone(
    members: Membership, damage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "REREAD_S", 0.1)
    for member in (FIRST, SECOND):
        members.announce(member)
    members.announce_router("http://r:1")
    for name in ("000000.json", "router.json"):
        (members.folder / name).write_text(damage)
    assert members.engines() == [SECOND]
    assert members.router() is None
    assert re.search(r"000000\.json is damaged \(.*announces itself again.*\n.*router\.json is damaged", caplog.text)
    members.withdraw(FIRST)
    members.announce(FIRST)
    members.announce_router("http://r:2")
    assert (members.engines(), members.router()) == ([FIRST, SECOND], "http://r:2")


def test_an_announcement_that_is_empty_while_it_is_replaced_is_read_again(members: Membership) -> None:
    for member in (FIRST, SECOND):
        members.announce(member)
    with empty_for(0.3, members.folder / "000000.json"):
        assert members.engines() == [FIRST, SECOND]
    with empty_for(0.3, members.folder / "000000.json"):
        assert members.lists(FIRST)


def test_a_withdrawn_engine_is_not_announced_again_by_what_changes_of_it(members: Membership) -> None:
    """A thread goes on with its replica while its server stops."""
    told = Announcement(members, Member(3, "http://h:1", 1), lambda: None)
    told.say()
    told.change(replicas=("/tmp/13",))
    assert [one.replicas for one in members.engines() if one.index == 3] == [("/tmp/13",)]
    told.withdraw()
    told.change(replicas=("/tmp/14",))
    assert [one for one in members.engines() if one.index == 3] == []


def test_files_are_opened_when_the_folder_has_changed(members: Membership, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    read = Membership._read
    monkeypatch.setattr(Membership, "_read", lambda self, name: [opened.append(name), read(self, name)][1])
    listed = Listed(members)
    assert listed.engines() == []
    members.announce(FIRST)
    members.announce(SECOND)

    def settle() -> None:
        os.utime(members.folder, ns=(0, members.folder.stat().st_mtime_ns - 10_000_000_000))

    assert listed.engines() == [FIRST, SECOND]
    opened.clear()
    assert listed.engines() == [FIRST, SECOND], "it has changed just now, and may change again at the same time"
    assert opened
    settle()
    listed.engines()
    opened.clear()
    assert listed.engines() == [FIRST, SECOND]
    assert opened == []
    members.announce(replace(FIRST, silent="hangs"))
    assert [one.silent for one in listed.engines()] == ["hangs", ""]
    settle()
    listed.engines()
    opened.clear()
    monkeypatch.setattr(membership, "REREAD_S", 0.0)
    listed.engines()
    assert opened, "another host's change may show late"
