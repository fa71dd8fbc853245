"""What the delta channel writes, and when a version is whole: a real learner, and engines that only listen."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_bridge.weight_sync import delta as module
from megatron_bridge.weight_sync.delta import DeltaChannel, PublishedShare, share_of
from megatron_bridge.weight_sync.disk import ProbeScorer, WeightCheckPlan
from pipeline.data.deltas import is_whole
from pipeline.data.files import SPARE_BYTES, is_temporary, size_of
from pipeline.data.membership import Member
from pipeline.data.run_directory import RunDirectory, numbered_folders
from pipeline.errors import DiskFullError, EngineUnavailableError
from precision.formats.quant_map import QuantMap, QuantMapFile
from rollout_sglang.weights.replica import Replica, tensor_places


@dataclass
class Listening:
    """Engines that take what they are told to, and refuse the versions in `refused`, once each."""

    refused: list[int] = field(default_factory=list)
    taken: list[tuple[int, bool]] = field(default_factory=list)
    """Version, and whether its folder was whole."""

    async def load(self, version: int, directory: Path, check: Any = None) -> dict[str, float]:
        await asyncio.sleep(0)
        self.taken.append((version, is_whole(directory)))
        if version in self.refused:
            self.refused.remove(version)
            raise EngineUnavailableError("no engine of 1 took it; its replica cannot be made")
        return {"load_s": 0.0}


class Publisher:
    def __init__(self, learner: Any, run: RunDirectory, whole_every: int = 100) -> None:
        quant = QuantMap.from_file(QuantMapFile(base="fp8_block"), learner.model_config.num_layers, None)
        plan = WeightCheckPlan(rows=((1, 2, 3, 4),), max_mean_gap_nats=1.0, new_checksums=None)
        self.learner, self.run, self.engines = learner, run, Listening()
        settings: dict[str, Any] = dict(keep=100, whole_every=whole_every, deadline_s=10.0)
        probe, engines = ProbeScorer(learner), self.engines
        self.channel = DeltaChannel(learner, engines, run, quant, plan, probe, **settings)  # type: ignore[arg-type]
        self.version = run.published_version()

    def publish(self, scale: float = 1.0) -> dict[str, float]:
        """The next version: some weights are scaled."""
        parameter = next(one for one in self.learner.model[0].parameters() if one.dim() == 2)
        parameter.data[:2] *= scale
        self.version += 1
        return self.channel.publish(self.version)

    @property
    def folder(self) -> Path:
        return self.run.policy_directory(self.version)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.make_folders()
    run.set_published(0)
    return run


def check_replica(publisher: Publisher, tmp_path: Path) -> None:
    """What deltas make of the version is what a new channel publishes whole."""
    (tmp_path / "replica").mkdir()
    made = tensor_places(Replica(publisher.run.policies, tmp_path / "replica").make(publisher.version))
    other = Publisher(publisher.learner, publisher.run)
    assert other.publish()["published_whole"] == 1.0
    written = tensor_places(other.folder)
    assert made.keys() == written.keys()
    for name, place in written.items():
        np.testing.assert_array_equal(made[name].map(), place.map(), err_msg=name)


def test_the_first_version_is_whole_then_now_and_then(learner: Any, run: RunDirectory, tmp_path: Path) -> None:
    publisher = Publisher(learner, run, whole_every=3)
    wholes = [publisher.publish(1.5)["published_whole"] for _ in range(8)]
    assert wholes == [1, 0, 0, 1, 0, 0, 1, 0]
    assert publisher.engines.taken == [(version, bool(whole)) for version, whole in enumerate(wholes, start=1)]
    check_replica(publisher, tmp_path)


def test_a_delta_that_no_engine_takes_is_published_again_whole(learner: Any, run: RunDirectory, tmp_path: Path) -> None:
    publisher = Publisher(learner, run)
    publisher.engines.refused = [2]
    publisher.publish()
    measured = publisher.publish(1.5)
    assert publisher.engines.taken == [(1, True), (2, False), (2, True)]
    assert (measured["published_whole"], measured["delta_density"]) == (1.0, 1.0)
    assert measured["published_bytes"] == measured["whole_bytes"]
    assert publisher.publish(1.5)["published_whole"] == 0.0
    check_replica(publisher, tmp_path)


def test_a_version_that_fails_altogether_is_not_what_the_next_is_compared_with(learner: Any, run: RunDirectory) -> None:
    publisher = Publisher(learner, run)
    publisher.publish()
    publisher.engines.refused = [2, 2]
    with pytest.raises(EngineUnavailableError):
        publisher.publish(1.5)
    assert run.published_version() == 1
    publisher.version = 1
    assert publisher.publish()["published_whole"] == 1.0


def test_after_an_engine_that_is_stuck_the_version_is_whole(learner: Any, run: RunDirectory) -> None:
    publisher = Publisher(learner, run)
    publisher.publish()
    assert publisher.publish(1.5)["published_whole"] == 0.0
    engine = Member(0, "http://h:1", 1)
    run.membership().announce(replace(engine, stuck="000002: it is damaged"))
    assert publisher.publish(1.5)["published_whole"] == 1.0
    run.membership().announce(engine)
    assert publisher.publish(1.5)["published_whole"] == 0.0


def test_a_dense_change_is_published_whole(learner: Any, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Publisher(learner, run)
    publisher.publish()
    monkeypatch.setattr(module, "DENSE", 0.0)
    assert publisher.publish(1.5)["published_whole"] == 1.0
    assert not list(publisher.folder.glob("delta*"))


def test_nothing_changed_is_a_version_all_the_same(learner: Any, run: RunDirectory, tmp_path: Path) -> None:
    """A step whose batch was lost by damage publishes the weights of the one before."""
    publisher = Publisher(learner, run)
    publisher.publish()
    measured = publisher.publish()
    assert (measured["delta_density"], measured["published_bytes"]) == (0.0, 0.0)
    check_replica(publisher, tmp_path)


class TwoAlike:
    """In the place of RankSync, on rank 0 of two that say the same."""

    rank = 0

    def __init__(self, _deadline_s: float) -> None:
        pass

    def gather(self, action: Callable[[], Any]) -> list[Any]:
        return [action()] * 2

    def tell(self, action: Callable[[], Any]) -> Any:
        return action()


def leave_free(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    free = SimpleNamespace(f_bavail=int(num_bytes) + SPARE_BYTES, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: free)


def test_there_must_be_room_for_the_shares_of_all_ranks(
    learner: Any, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RankSync", TwoAlike)
    publisher = Publisher(learner, run)
    whole = publisher.publish()["whole_bytes"]
    leave_free(monkeypatch, 0.75 * whole)
    with pytest.raises(DiskFullError, match=r"too full for version 2"):
        publisher.publish()
    leave_free(monkeypatch, 1.25 * whole)
    publisher.version = 1
    assert publisher.publish()["published_whole"] == 0.0


def test_after_a_start_there_must_be_room_for_what_is_there_already(
    learner: Any, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Publisher(learner, run)
    before.publish()
    before.publish(1.5)  # a delta, which is small
    leave_free(monkeypatch, 0.75 * size_of(run.policy_directory(1)))
    with pytest.raises(DiskFullError, match=r"too full for version 3"):
        Publisher(learner, run).publish()


@pytest.mark.parametrize(("place", "lost"), [(PublishedShare, "take"), (module, "write_shards")])
def test_a_version_that_cannot_be_written_leaves_no_folder(
    learner: Any, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, place: Any, lost: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    publisher = Publisher(learner, run)
    publisher.publish()
    publisher.channel._base = None  # the next one is whole
    monkeypatch.setattr(place, lost, full)
    with pytest.raises(OSError, match="No space left"):
        publisher.publish()
    assert numbered_folders(run.policies) == [1]
    assert not any(is_temporary(path.name) for path in run.policies.iterdir())


def test_what_an_engine_stacks_stays_together_and_ranks_share_evenly() -> None:
    names = [
        f"model.layers.{layer}.{module}.weight"
        for layer in range(8)
        for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.experts.0.up_proj", "mlp.experts.1.gate_proj")
    ] + ["model.embed_tokens.weight", "lm_head.weight"]
    shapes = {name: (100, 100) for name in names}
    shares = [share_of(names, shapes, rank, 3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(names)
    for share in shares:
        assert len(share) == pytest.approx(len(names) / 3, abs=2)
        for name in share:
            assert name.replace("q_proj", "k_proj") in share
            assert name.replace("0.up_proj", "1.gate_proj") in share or ".experts.0." not in name
