"""Which ranks of a stage keep a version in host memory: a real learner in the place of each, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.weight_sync import streaming
from megatron_bridge.weight_sync.disk import WeightCheckPlan
from megatron_bridge.weight_sync.probe import ProbeScorer
from megatron_bridge.weight_sync.process_group_transport import ProcessGroupTransport
from megatron_bridge.weight_sync.streaming import StreamedChannel
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import DiskFullError

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")
]

STAGE_SIZE = 4


class LikeRanks:
    """In the place of RankSync: the ranks of one stage, all of which say what this one does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_gather_json(self, value: Any) -> list[Any]:
        return [value] * STAGE_SIZE

    def all_gather_result(self, action: Callable[[], Any]) -> list[Any]:
        return self.all_gather_json(action())


class NoEngines:
    """In the place of a WeightUpdateSession: nothing is delivered."""

    async def close(self) -> None:
        pass


def test_a_disk_without_room_for_the_folder_is_said_before_the_engines_are_asked(
    learner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "RankSync", lambda _deadline_s: LikeRanks(0))
    monkeypatch.setattr(streaming, "expected_bytes", lambda *_: 1 << 60)
    monkeypatch.setattr(ProbeScorer, "score", lambda *_: (None, {}))
    plan = WeightCheckPlan(rows=((1, 2, 3, 4),), max_mean_gap_nats=1.0, new_checksums=None)
    settings: dict[str, Any] = dict(num_engines=1, keep=1, bucket_bytes=1 << 20, deadline_s=10.0)
    run, session = RunDirectory(tmp_path / "run"), NoEngines()
    run.make_folders()
    channel = StreamedChannel(
        learner,
        session,
        run,
        None,
        plan,
        ProbeScorer(learner),
        ProcessGroupTransport,
        **settings,  # type: ignore[arg-type]
    )
    with pytest.raises(DiskFullError, match="too full for version 13"):
        channel.publish(13)
    channel.close()


@pytest.mark.parametrize(("num_engines", "senders"), [(1, 1), (3, 3), (9, 4)])
def test_only_ranks_that_send_keep_a_version(
    learner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_engines: int, senders: int
) -> None:
    monkeypatch.setattr(StreamedChannel, "_deliver", lambda *_: {})
    plan = WeightCheckPlan(rows=((1, 2, 3, 4),), max_mean_gap_nats=1.0, new_checksums=None)
    settings: dict[str, Any] = dict(num_engines=num_engines, keep=1, bucket_bytes=1 << 20, deadline_s=10.0)
    probe, kept = ProbeScorer(learner), []
    for rank in range(STAGE_SIZE):
        monkeypatch.setattr(streaming, "RankSync", lambda _deadline_s, rank=rank: LikeRanks(rank))
        session: Any = NoEngines()
        run = RunDirectory(tmp_path / "run")
        channel = StreamedChannel(learner, session, run, None, plan, probe, ProcessGroupTransport, **settings)
        for version in (1, 2):
            channel.publish(version)
            kept.append(bool(channel._snapshot._memory))
        channel.close()
    assert kept == [rank < senders for rank in range(STAGE_SIZE) for _ in range(2)]
