"""Of several processes that take up a role, only the last may write."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.data import epochs, files
from pipeline.data.epochs import claim, epoch_folder, first_start_after, newest
from pipeline.data.files import create_exclusively, is_temporary, replacing, temporary_name, write_atomically
from pipeline.data.membership import Member, Membership
from pipeline.errors import RetryableError, StoppedError, StoreError, SupersededError


def test_a_later_start_supersedes_an_earlier_one(tmp_path: Path) -> None:
    first = claim(tmp_path, "collector")
    first.check()
    second = claim(tmp_path, "collector")
    second.check()
    with pytest.raises(SupersededError, match="start 1, and start 2 has taken over"):
        first.check()
    assert first.is_superseded()
    assert not second.is_superseded()
    assert second.name == "collector-000002"


def test_roles_and_indices_are_counted_apart(tmp_path: Path) -> None:
    claimed = [claim(tmp_path, "learner"), claim(tmp_path, "engine", 0), claim(tmp_path, "engine", 1)]
    assert [epoch.number for epoch in claimed] == [1, 1, 1]
    assert [epoch.name for epoch in claimed] == ["learner-000001", "engine-0-000001", "engine-1-000001"]


def test_starts_at_the_same_time_get_different_numbers(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        claimed = list(threads.map(lambda _: claim(tmp_path, "learner"), range(24)))
    assert sorted(epoch.number for epoch in claimed) == list(range(1, 25))
    assert newest(epoch_folder(tmp_path, "learner")) == 24
    assert [epoch.number for epoch in claimed if not epoch.is_superseded()] == [24]


def test_a_slower_start_does_not_set_the_pointer_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, later = epochs.write_sealed, []

    def after_another(path: Path, text: str) -> None:
        if not later:
            later.append("begins")
            later.append(claim(tmp_path, "learner").name)
        write(path, text)

    monkeypatch.setattr(epochs, "write_sealed", after_another)
    slower = claim(tmp_path, "learner")
    assert (slower.name, later[1]) == ("learner-000001", "learner-000002")
    assert (slower.folder / "NEWEST").read_text().startswith("000002")


@pytest.mark.parametrize(
    ("moment", "longest_pause_s", "first"),
    [(50, 1000, 5000), (50, 4000, 100), (1000, 4000, 5000), (5200, 1000, 5500), (5500, 1000, None)],
)
def test_starts_before_a_longer_pause_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: float, longest_pause_s: float, first: float | None
) -> None:
    for began in (100.0, 1000.0, 5000.0, 5500.0):
        monkeypatch.setattr(epochs.time, "time", lambda began=began: began)
        claim(tmp_path, "learner")
    assert first_start_after(epoch_folder(tmp_path, "learner"), moment, longest_pause_s) == first


@pytest.mark.parametrize("hidden", ["000002", "NEWEST"])
def test_a_stale_view_of_either_file_does_not_hide_a_later_start(tmp_path: Path, hidden: str) -> None:
    first = claim(tmp_path, "learner")
    claim(tmp_path, "learner")
    (first.folder / hidden).unlink()
    assert first.is_superseded()


def test_a_damaged_pointer_is_named(tmp_path: Path) -> None:
    epoch = claim(tmp_path, "learner")
    (epoch.folder / "NEWEST").write_text("?")
    with pytest.raises(StoreError, match="NEWEST is damaged"):
        epoch.check()


def test_a_pointer_that_stays_empty_may_be_read_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "REREAD_S", 0.1)
    epoch = claim(tmp_path, "learner")
    (epoch.folder / "NEWEST").write_text("")
    with pytest.raises(RetryableError, match="it is empty"):
        epoch.check()


@pytest.mark.parametrize("trouble", ["", OSError(errno.ESTALE, "Stale file handle")])
def test_a_pointer_that_cannot_be_read_while_it_is_replaced_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str | OSError
) -> None:
    epoch = claim(tmp_path, "learner")
    read, times = files.read_at_most, 0

    def read_at_most(path: Path, num_bytes: int) -> bytes:
        nonlocal times
        times += 1
        if times > 2:
            return read(path, num_bytes)
        if isinstance(trouble, OSError):
            raise trouble
        return trouble.encode()

    monkeypatch.setattr("pipeline.data.epochs.read_at_most", read_at_most)
    epoch.check()
    assert times == 3


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_a_listing_that_fails_for_a_moment_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Healthy work looks every two seconds whether it is superseded."""
    epoch = claim(tmp_path, "learner")
    listed, failures = os.listdir, [OSError(code, os.strerror(code))] * 2

    def listdir(path: Path) -> list[str]:
        if failures:
            raise failures.pop()
        return listed(path)

    monkeypatch.setattr(os, "listdir", listdir)
    epoch.check()
    assert failures == []
    failures.extend([OSError(code, os.strerror(code))] * 100)
    monkeypatch.setattr(files, "REREAD_S", 0.1)
    with pytest.raises(OSError, match=os.strerror(code)):
        epoch.check()


@pytest.mark.parametrize(("code", "raised"), [(errno.EOPNOTSUPP, StoreError), (errno.ENOSPC, OSError)])
def test_hard_links_are_blamed_only_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, raised: type[Exception]
) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(raised, match="hard link" if raised is StoreError else "No space"):
        create_exclusively(tmp_path / "one", "")
    assert list(tmp_path.iterdir()) == []


def test_exclusive_creation_has_one_winner_whose_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "one"

    def create(number: int) -> bool:
        try:
            create_exclusively(path, str(number) * 10_000)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(create, range(8)))
    assert sum(won) == 1
    assert path.read_text() == str(won.index(True)) * 10_000
    assert [one.name for one in tmp_path.iterdir()] == ["one"], "what the losers wrote is gone"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "pointer"
    write_atomically(path, "old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.write("text")  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["pointer"]
    assert is_temporary(temporary_name(path).name)
    assert not is_temporary(path.name)


def test_engines_join_and_leave(tmp_path: Path) -> None:
    membership = Membership(tmp_path / "engines")
    assert membership.engines() == []
    assert membership.router() is None
    old, new, other = Member(3, "http://a:1", 1), Member(3, "http://b:1", 2), Member(0, "http://c:1", 1)
    for member in (old, other):
        membership.announce(member)
    assert membership.engines() == [other, old]
    membership.announce(new)
    membership.withdraw(old)
    assert membership.engines() == [other, new], "the leaving start does not take its successor away"
    membership.withdraw(new)
    assert membership.engines() == [other]
    membership.announce_router("http://r:1")
    assert membership.router() == "http://r:1"
    membership.withdraw_router("http://earlier:1")
    assert membership.router() == "http://r:1"
    membership.withdraw_router("http://r:1")
    assert membership.router() is None


def test_a_start_sees_whether_it_is_listed(tmp_path: Path) -> None:
    membership, own = Membership(tmp_path), Member(3, "http://b:1", 2)
    assert not membership.lists(own)
    membership.announce(own)
    assert membership.lists(own)
    membership.announce(Member(3, "http://a:1", 1))
    assert not membership.lists(own)
    (tmp_path / "000003.json").write_text("{")
    assert not membership.lists(own), "damaged: it is announced again"


def test_given_urls_are_the_engines(tmp_path: Path) -> None:
    given = Membership(tmp_path / "engines", ("http://x:1", "http://y:1"))
    assert [(member.index, member.url) for member in given.engines()] == [(0, "http://x:1"), (1, "http://y:1")]


@pytest.mark.parametrize("trouble", [FileNotFoundError("gone"), StoreError("damaged"), StoppedError("asked to end")])
def test_what_goes_wrong_after_a_later_start_is_its_doing(tmp_path: Path, trouble: Exception) -> None:
    """A missing file would be an ordinary death, and a fatal error the end of the run."""
    epoch = claim(tmp_path, "learner")
    with pytest.raises(type(trouble)), epoch.as_superseded():
        raise trouble
    claim(tmp_path, "learner")
    with pytest.raises(SupersededError, match="start 2 has taken over") as raised, epoch.as_superseded():
        raise trouble
    assert raised.value.__context__ is trouble
