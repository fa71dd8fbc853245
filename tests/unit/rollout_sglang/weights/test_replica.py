"""The weights of a run on an engine's own host, made from policy folders."""

import asyncio
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline.data import deltas
from pipeline.data.deltas import DELTA_FILE, chain_to, read_link
from pipeline.data.membership import Announcement, Member, Membership
from pipeline.data.run_directory import RunDirectory, unfenced
from pipeline.errors import DeadlineExceededError, EngineVersionError, StoreError, SupersededError
from rollout_sglang.engine_pool import EnginePool, PooledEngine
from rollout_sglang.fleet import Target, prepared
from rollout_sglang.server.start import EngineSpec
from rollout_sglang.weights import replica
from rollout_sglang.weights import replica as module
from rollout_sglang.weights.replica import Replica, ReplicaKeeper, replica_name, tensor_places
from tests.support.delta_policies import NAMES, Tensors, drawn, moved, write_version

LAST = 14


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Tensors]]:
    """10 whole, deltas 11 and 12, 13 whole with a delta, delta 14."""
    policies, versions = tmp_path_factory.mktemp("written"), dict[int, Tensors]()
    versions[10] = drawn(0)
    write_version(policies, 10, versions[10])
    for version in range(11, LAST + 1):
        versions[version] = moved(versions[version - 1], version)
        base = (version - 1, versions[version - 1])
        write_version(policies, version, versions[version], base=base, whole=version == 13)
    return policies, versions


@pytest.fixture
def published(tmp_path: Path, written: tuple[Path, dict[int, Tensors]]) -> dict[int, Tensors]:
    """A copy of them under policy/; the tensors by version."""
    shutil.copytree(written[0], tmp_path / "policy")
    return written[1]


def new_replica(tmp_path: Path) -> Replica:
    folder = tmp_path / "replica"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return Replica(tmp_path / "policy", folder)


def check(folder: Path, expected: Tensors) -> None:
    found = load_file(folder / "model-00001.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor)


def test_every_version_from_nothing(tmp_path: Path, published: dict[int, Tensors]) -> None:
    for version, tensors in published.items():
        check(new_replica(tmp_path).make(version), tensors)


def test_one_version_after_the_other(tmp_path: Path, published: dict[int, Tensors]) -> None:
    """Two folders take turns; the weights that were made last are never written to."""
    replica, before = new_replica(tmp_path), None
    for version, tensors in published.items():
        folder = replica.make(version)
        check(folder, tensors)
        if before is not None:
            check(before, published[version - 1])
            assert replica.folders == [before, folder]
        assert replica.make(version) == folder
        before = folder
    assert sorted(path.name for path in (tmp_path / "replica").iterdir()) == sorted(p.name for p in replica.folders)


def test_only_what_changed_is_read_after_the_first(tmp_path: Path, published: dict[int, Tensors]) -> None:
    replica = new_replica(tmp_path)
    replica.make(10)
    replica.make(11)
    for version in (10, 13):
        (tmp_path / "policy" / f"{version:06}" / "model-00001.safetensors").unlink()
    for version in (12, 13, 14):
        check(replica.make(version), published[version])


def test_before_a_folder_is_written_to_it_is_not_listed(tmp_path: Path, published: dict[int, Tensors]) -> None:
    replica, listed = new_replica(tmp_path), list[list[str]]()

    def note(folders: Sequence[Path]) -> None:
        listed.append([folder.name[:6] for folder in folders])
        assert all(folder.exists() for folder in folders)

    replica.on_change = note
    for version in (10, 11, 12):
        replica.make(version)
    assert listed == [["000010"], ["000010", "000011"], ["000011"], ["000011", "000012"]]


def test_a_version_that_was_published_again_is_another_one(tmp_path: Path, published: dict[int, Tensors]) -> None:
    replica = new_replica(tmp_path)
    first = replica.make(12)
    shutil.rmtree(tmp_path / "policy" / "000012")
    again = drawn(9)
    write_version(tmp_path / "policy", 12, again)
    second = replica.make(12)
    assert second != first
    check(second, again)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda policies: flip(policies / "000012" / "delta-00000.bin"),
        lambda policies: (policies / "000012" / "delta-00000.bin").unlink(),
        lambda policies: flip(policies / "000012" / DELTA_FILE),
        lambda policies: shutil.rmtree(policies / "000012"),
        lambda policies: flip(policies / "000012" / "manifest.json"),
        lambda policies: shutil.copy(policies / "000011" / "delta-00000.bin", policies / "000012" / "delta-00000.bin"),
        lambda policies: [
            shutil.rmtree(policies / "000012"),
            shutil.copytree(policies / "000011", policies / "000012"),
        ],
    ],
    ids=["flipped", "no payload", "delta.json", "missing", "manifest", "payload of another", "doubled"],
)
@pytest.mark.parametrize("held", [(), (10,), (10, 11)])
def test_a_delta_that_is_damaged_missing_or_doubled_is_found(
    tmp_path: Path, published: dict[int, Tensors], damage: Callable[[Path], object], held: tuple[int, ...]
) -> None:
    """It is never loaded, and the next whole version goes on."""
    replica = new_replica(tmp_path)
    for version in held:
        replica.make(version)
    damage(tmp_path / "policy")
    with pytest.raises(StoreError):
        replica.make(12)
    for folder in replica.folders:
        check(folder, published[int(folder.name[:6])])
    check(replica.make(14), published[14])


def test_damage_that_the_next_delta_overwrites_harms_only_its_own_version(
    tmp_path: Path, published: dict[int, Tensors]
) -> None:
    """What counts is whether the tensors are those of the version's manifest."""
    honest = moved(published[14], 15)
    other, after = (
        {name: np.where(tensor != published[14][name], tensor ^ bit, tensor) for name, tensor in honest.items()}
        for bit in (np.uint8(2), np.uint8(4))
    )
    folder = write_version(tmp_path / "policy", 15, honest, base=(14, published[14]))
    damaged = write_version(tmp_path / "damaged", 15, other, base=(14, published[14]))
    for name in ("delta-00000.bin", DELTA_FILE):
        shutil.copy(damaged / name, folder / name)
    write_version(tmp_path / "policy", 16, after, base=(15, honest))
    replica = new_replica(tmp_path)
    with pytest.raises(StoreError, match=r"is not as .*000015 says"):
        replica.make(15)
    check(replica.make(16), after)


def test_weights_that_were_copied_are_compared(tmp_path: Path, published: dict[int, Tensors]) -> None:
    flip(tmp_path / "policy" / "000013" / "model-00001.safetensors")
    with pytest.raises(StoreError, match="000013 does not hold tensor"):
        new_replica(tmp_path).make(14)
    assert list((tmp_path / "replica").iterdir()) == []


def header_of(offsets: object) -> bytes:
    header = json.dumps({NAMES[0]: dict(dtype="F32", shape=[4], data_offsets=offsets)}).encode()
    return len(header).to_bytes(8, "little") + header


DAMAGED_HEADERS = {
    "beyond the file": header_of([0, 2**36]) + bytes(16),
    "negative": header_of([-16, 0]) + bytes(16),
    "backwards": header_of([16, 0]) + bytes(16),
    "huge": header_of([0, 10**400]) + bytes(16),
    "fractions": header_of([0.0, 16.0]) + bytes(16),
    "no numbers": header_of(["0", "16"]) + bytes(16),
    "three": header_of([0, 8, 16]) + bytes(16),
    "a list": (2).to_bytes(8, "little") + b"[]",
    "no entry": (8).to_bytes(8, "little") + b'{"a": 1}',
    "nested": (10**5).to_bytes(8, "little") + b"[" * 10**5,
    "longer than the file": (10**6).to_bytes(8, "little") + b"{}",
    "largest number": b"\xff" * 8 + b"{}",
    "empty": b"",
}


@pytest.mark.parametrize("damage", DAMAGED_HEADERS)
def test_a_header_that_lies_is_an_error_and_makes_no_file_longer(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGED_HEADERS[damage])
    with pytest.raises(StoreError, match=r"model\.safetensors is no safetensors file \("):
        {name: place.map() for name, place in tensor_places(tmp_path).items()}
    assert path.stat().st_size == len(DAMAGED_HEADERS[damage])


def test_a_header_is_read_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(header_of([0, 16]) + bytes(16))
    assert tensor_places(tmp_path)[NAMES[0]].map().tolist() == [0] * 16
    monkeypatch.setattr(module, "MOST_HEADER_BYTES", 50)
    with pytest.raises(StoreError, match=r"its header has \d+ bytes, at most 50 are possible"):
        tensor_places(tmp_path)


def test_a_tensor_that_no_delta_names_must_be_the_same(tmp_path: Path, published: dict[int, Tensors]) -> None:
    tensors = moved(published[14], 1, names=NAMES[:1])
    lied = moved(tensors, 2, names=NAMES[1:])
    folder = write_version(tmp_path / "policy", 15, tensors, base=(14, published[14]))
    honest = write_version(tmp_path / "lied", 15, lied)
    shutil.copy(honest / "manifest.json", folder / "manifest.json")
    replica = new_replica(tmp_path)
    replica.make(14)
    with pytest.raises(StoreError, match="of which no delta says so"):
        replica._make(chain_to(tmp_path / "policy", 15, {replica._held[-1].link.state}))


@pytest.mark.parametrize("strike", range(12))
def test_a_failure_at_any_call_leaves_what_is_served_as_it_was(
    tmp_path: Path, published: dict[int, Tensors], strike: int
) -> None:
    """A full disk at the n-th call that writes or reads: what is listed is whole, and the next attempt succeeds."""
    replica, calls = new_replica(tmp_path), 0
    replica.make(10)
    replica.make(11)
    serving = replica.folders[-1]

    def striking(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == strike + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        return call

    with (
        patch.object(module.np, "memmap", striking(np.memmap)),
        patch.object(module, "_sha256", striking(module._sha256)),
        patch.object(module.shutil, "copyfile", striking(shutil.copyfile)),
        patch("pipeline.data.deltas.apply", striking(deltas.apply)),
    ):
        try:
            replica.make(12)
        except OSError:
            assert calls == strike + 1
    check(serving, published[11])
    assert serving in replica.folders
    for folder in replica.folders:
        check(folder, published[int(folder.name[:6])])
    check(replica.make(12), published[12])


OWN = Member(0, "http://h:1", 1)


class Host:
    """A run with version 1, whole, and an engine's role on another host."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder)
        self.tensors: Tensors = drawn(0, count=500)
        write_version(self.run.policies, 1, self.tensors)
        self.newest = 1
        self.told = Announcement(self.run.membership(), OWN, unfenced)
        self.keeper = ReplicaKeeper(self.run, self.told.change)

    def publish(self) -> Path:
        """One more delta."""
        before, self.tensors = self.tensors, moved(self.tensors, self.newest)
        self.newest += 1
        return write_version(self.run.policies, self.newest, self.tensors, base=(self.newest - 1, before))

    def spec(self) -> EngineSpec:
        folder = self.run.policy_directory(self.newest)
        return EngineSpec(model=folder, port=1, precision="fp32", dtype="float32", log=None, version=self.newest)

    def begin(self) -> EngineSpec:
        spec = self.keeper.first(self.spec)
        self.told.say()
        self.keeper.begin()
        return spec

    def prepare(self, version: int, deadline_s: float = 10.0) -> Path:
        """As the learner would, before it pauses the engine."""
        membership = Membership(self.run.membership().folder)
        pool = EnginePool(membership, None, 1.0, None)
        [member] = membership.engines()
        engine: Any = Mock(spec=PooledEngine, member=member, index=0, url=member.url, quarantined="it begins so")
        target = Target(version, self.run.policy_directory(version), None)
        return asyncio.run(prepared(pool, engine, target, deadline_s))[0].directory

    def name(self, version: int) -> str:
        return replica_name(version, read_link(self.run.policies, version).state)


@pytest.fixture
def host(tmp_path: Path) -> Any:
    host = Host(tmp_path / "run")
    yield host
    host.keeper.close()


def test_a_late_engine_starts_at_the_newest_version_and_follows(host: Host) -> None:
    host.publish()
    spec = host.begin()
    assert (spec.version, spec.model.name) == (2, host.name(2))
    host.publish()
    found = host.prepare(3)
    assert found.name == host.name(3)
    assert found.parent == spec.model.parent
    assert host.prepare(2) == spec.model, "what is served is there still"
    host.keeper.close()
    assert not found.parent.exists()


def test_a_delta_that_cannot_be_applied_is_said_and_a_later_whole_version_goes_on(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "RETRY_S", 60.0)
    host.begin()
    folder = host.publish()
    aside = host.run.path / "aside"
    next(folder.glob("delta-*.bin")).rename(aside)
    with pytest.raises(
        EngineVersionError, match=rf"cannot make its replica {host.name(2)}: .*does not hold the changes of"
    ):
        host.prepare(2)
    host.newest += 1
    write_version(host.run.policies, 3, host.tensors)
    assert host.prepare(3).name == host.name(3)
    with pytest.raises(EngineVersionError, match="beyond 000002"):
        host.prepare(2)


def test_what_nobody_expected_is_said_and_the_next_version_goes_on(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "RETRY_S", 60.0)
    host.begin()
    with monkeypatch.context() as patch:
        patch.setattr(Replica, "make", Mock(side_effect=OverflowError))
        host.publish()
        with pytest.raises(EngineVersionError, match=rf"cannot make its replica {host.name(2)}: OverflowError"):
            host.prepare(2)
    host.publish()
    assert host.prepare(3).name == host.name(3)


def test_a_version_that_is_published_again_is_made_again(host: Host) -> None:
    host.begin()
    folder = host.publish()
    first = host.prepare(2)
    shutil.rmtree(folder)
    write_version(host.run.policies, 2, drawn(5, count=500))
    second = host.prepare(2)
    assert first.name != second.name == host.name(2)


def test_nobody_waits_longer_than_the_deadline(host: Host) -> None:
    host.keeper.first(host.spec)
    host.told.say()
    host.publish()
    with pytest.raises(EngineVersionError, match=r"did not make its replica 000002-\w+ within 0.1 s"):
        host.prepare(2, deadline_s=0.1)


def test_an_engine_without_a_replica_loads_whole_versions_only(host: Host) -> None:
    host.told.say()
    assert host.prepare(1) == host.run.policy_directory(1)
    host.publish()
    with pytest.raises(EngineVersionError, match="has no replica"):
        host.prepare(2)


def test_a_superseded_start_says_nothing(tmp_path: Path) -> None:
    fence = Mock(side_effect=SupersededError("later"))
    told = Announcement(Membership(tmp_path), OWN, fence)
    told.change(stuck="x")
    with pytest.raises(SupersededError):
        told.say(silent="hangs")
    assert Membership(tmp_path).engines() == []
    assert told.member == replace(OWN, silent="hangs", stuck="x")


def unanswered(host: Host, monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What the run answers to the next announcements: of what there is, and of why there is not more."""
    fails: list[Exception] = [DeadlineExceededError("the pointer cannot be read")] * 2

    def fence() -> None:
        if fails:
            raise fails.pop()

    monkeypatch.setattr(host.told, "_fence", fence)
    return fails


def test_a_run_that_does_not_answer_at_an_announcement_is_followed_further(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host.begin()
    fails = unanswered(host, monkeypatch)
    host.publish()
    ends = time.monotonic() + 20
    while fails:
        assert time.monotonic() < ends
        time.sleep(0.01)
    host.publish()
    assert host.prepare(3).name == host.name(3)
    assert "warning: the pointer cannot be read; the replica is looked at again" in capsys.readouterr().out


def test_what_could_not_be_announced_is_announced_later(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner waits for it, and publishes nothing meanwhile."""
    monkeypatch.setattr(replica, "RETRY_S", 0.1)
    host.begin()
    unanswered(host, monkeypatch)
    host.publish()
    assert host.prepare(2, deadline_s=3.0).name == host.name(2)
