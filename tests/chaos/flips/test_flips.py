"""The flips, on files that stand for a run. One of each kind of a real run's files is tried by
tests/integration/test_loop.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.data.checksums import read_sealed, write_sealed
from tests.chaos.flips import flip
from tests.chaos.flips.flip import KINDS, files_of, flips, try_flip
from tests.chaos.ledger import OK


def test_ids_are_stable_and_kinds_take_turns() -> None:
    names = [case.id for case in flips(60)]
    assert len(set(names)) == 60
    assert names[:25] == [case.id for case in flips(25)]
    assert {name.split(" ", 1)[1] for name in names[: len(KINDS)]} == set(KINDS)


def test_a_reader_is_asked_of_each_file_that_it_opens_of_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first flip keeps it from opening FORMAT."""
    names = ("recipe.yaml", "FORMAT")
    for name in names:
        write_sealed(tmp_path / name, "text\n")
    monkeypatch.setattr(flip, "READERS", dict(start=lambda run: "".join(read_sealed(run / one, "") for one in names)))
    for kind in ("recipe", "format"):
        details: dict[str, Any] = {}
        assert try_flip(tmp_path, kind, 0, details) == OK
        assert details["noticed_by"] == ["start"]


def test_files_that_nothing_goes_by_are_not_flipped(tmp_path: Path) -> None:
    member, link = tmp_path / "engines/000000.json", tmp_path / "engines/starting/000000/config.json"
    link.parent.mkdir(parents=True)
    for path in (member, link):
        write_sealed(path, "{}\n")
    assert files_of(tmp_path, "members") == [member]
