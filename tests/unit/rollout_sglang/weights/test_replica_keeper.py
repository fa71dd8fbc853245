"""An engine's replica follows the run, and whoever gives the engine weights waits for it."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pipeline.data.deltas import read_link
from pipeline.data.membership import Announcement, Member, Membership
from pipeline.data.run_directory import RunDirectory, unfenced
from pipeline.errors import DeadlineExceededError, EngineVersionError, SupersededError
from rollout_sglang.engine_pool import EnginePool, PooledEngine
from rollout_sglang.server.start import EngineSpec
from rollout_sglang.target import Target
from rollout_sglang.weights import replica_keeper
from rollout_sglang.weights.prepared import prepared
from rollout_sglang.weights.replica import Replica, replica_name
from rollout_sglang.weights.replica_keeper import ReplicaKeeper
from tests.support.delta_policies import Tensors, drawn, moved, write_version

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
    monkeypatch.setattr(replica_keeper, "RETRY_S", 60.0)
    host.begin()
    folder = host.publish()
    aside = host.run.path / "aside"
    next(folder.glob("delta-*.bin")).rename(aside)
    with pytest.raises(
        EngineVersionError, match=rf"cannot make its replica {host.name(2)}: .*does not hold what changed"
    ):
        host.prepare(2)
    host.newest += 1
    write_version(host.run.policies, 3, host.tensors)
    assert host.prepare(3).name == host.name(3)
    with pytest.raises(EngineVersionError, match="beyond 000002"):
        host.prepare(2)


def test_what_nobody_expected_is_said_and_the_next_version_goes_on(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_keeper, "RETRY_S", 60.0)
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
    monkeypatch.setattr(replica_keeper, "RETRY_S", 0.1)
    host.begin()
    unanswered(host, monkeypatch)
    host.publish()
    assert host.prepare(2, deadline_s=3.0).name == host.name(2)


def test_a_superseded_start_follows_no_further(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.begin()
    monkeypatch.setattr(host.told, "_fence", Mock(side_effect=SupersededError("later")))
    host.publish()
    host.keeper._thread.join(20)
    assert not host.keeper._thread.is_alive()
