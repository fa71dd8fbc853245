"""Which policy folders a version is made from."""

from pathlib import Path

import pytest

from pipeline.data import deltas
from pipeline.data.checksums import seal, unseal
from pipeline.data.deltas import (
    DELTA_FILE,
    MANIFEST_FILE,
    Delta,
    Link,
    chain_to,
    needed,
    read_link,
    read_manifest,
)
from pipeline.errors import StoreError
from tests.support.delta_policies import drawn, moved, write_version
from tests.support.files import huge_at, pipe_at


@pytest.fixture
def policies(tmp_path: Path) -> Path:
    """10 whole, deltas 11 and 12, 13 whole with a delta, delta 14."""
    tensors = drawn(0)
    write_version(tmp_path, 10, tensors)
    for version in (11, 12, 13, 14):
        before, tensors = tensors, moved(tensors, version)
        write_version(tmp_path, version, tensors, base=(version - 1, before), whole=version == 13)
    return tmp_path


def versions(policies: Path, version: int, *held: int) -> list[int]:
    states = {read_link(policies, one).state for one in held}
    return [link.version for link in chain_to(policies, version, states)]


def test_from_the_newest_weights_or_from_what_is_held(policies: Path) -> None:
    assert versions(policies, 10) == [10]
    assert versions(policies, 12) == [10, 11, 12]
    assert versions(policies, 13) == [13]
    assert versions(policies, 14) == [13, 14]
    assert versions(policies, 14, 12) == [12, 13, 14]
    assert versions(policies, 14, 11, 12) == [12, 13, 14]
    assert versions(policies, 14, 14) == [14]


def test_what_is_held_and_no_part_of_the_chain_does_not_matter(policies: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_version(other, 12, drawn(5))
    assert [one.version for one in chain_to(policies, 14, {read_link(other, 12).state})] == [13, 14]


def test_what_is_no_manifest_is_not_read_to_its_end(tmp_path: Path) -> None:
    for put, said in ((pipe_at, "no regular file"), (huge_at, "larger than 64 MiB")):
        put(tmp_path / MANIFEST_FILE)
        with pytest.raises(StoreError, match=rf"manifest\.json cannot be read \(it is {said}\); publish it again"):
            read_manifest(tmp_path, "publish it again")


def test_links_before_the_weights_may_be_gone(policies: Path) -> None:
    (policies / "000011").rename(policies / "gone")
    assert versions(policies, 14) == [13, 14]
    assert versions(policies, 14, 10) == [13, 14]
    with pytest.raises(StoreError, match="000011"):
        versions(policies, 12)


def test_a_base_that_was_published_again_with_other_weights_is_found(policies: Path) -> None:
    (policies / "000011").rename(policies / "gone")
    write_version(policies, 11, drawn(7))
    with pytest.raises(StoreError, match="000011 holds other weights than those that the delta of version 12"):
        versions(policies, 12)


def test_a_delta_under_another_name_is_found(policies: Path) -> None:
    """A doubled one: the folder of version 12 once more, as version 15."""
    (policies / "000012").rename(policies / "000015")
    with pytest.raises(StoreError, match="000015 holds the delta from version 11 to 12"):
        versions(policies, 15)


def test_what_kept_versions_need(policies: Path) -> None:
    assert needed(policies, [14]) == {13, 14}
    assert needed(policies, [12, 14]) == {10, 11, 12, 13, 14}
    assert needed(policies, [13]) == {13}
    (policies / "000010").rename(policies / "gone")
    assert needed(policies, [12]) == {11, 12}
    assert needed(policies, [12, 14]) == {11, 12, 13, 14}


@pytest.mark.parametrize("unread", [11, 12])
def test_what_cannot_be_read_for_a_moment_may_need_all_from_the_newest_weights_on(
    policies: Path, monkeypatch: pytest.MonkeyPatch, unread: int
) -> None:
    """Else what a served version is made from would be deleted because of one error of a mount."""
    read = deltas.read_link

    def fails(folder: Path, version: int) -> Link:
        if version == unread:
            raise StoreError("delta.json is damaged (Stale file handle)")
        return read(folder, version)

    monkeypatch.setattr(deltas, "read_link", fails)
    assert needed(policies, [12]) == {10, 11, 12}
    assert needed(policies, [14]) == {13, 14}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version": 12', '"version": -1'),
        ('"base": 11', '"base": "11"'),
        ('"payloads": {', '"payloads": {"x": [[0]], '),
        ('"widths": {', '"widths": {"x": 3, '),
        ('"crc32"', '"crc"'),
    ],
)
def test_a_damaged_delta_is_named(policies: Path, old: str, new: str) -> None:
    path = policies / "000012" / DELTA_FILE
    data = path.read_bytes()
    changed = data.replace(old.encode(), new.encode())
    assert changed != data
    path.write_bytes(changed if "crc" in old else seal(unseal(data).replace(old, new)).encode())
    with pytest.raises(StoreError, match=f"{path} is damaged"):
        Delta.load(path.parent, "mend it")
