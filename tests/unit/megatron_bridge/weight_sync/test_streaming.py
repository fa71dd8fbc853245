"""Which ranks of a stage keep a version in host memory: a real learner in the place of each, one after the other."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_bridge.weight_sync import streaming
from megatron_bridge.weight_sync.disk import ProbeScorer, WeightCheckPlan
from megatron_bridge.weight_sync.streaming import (
    FolderWriter,
    HostSnapshot,
    StreamedChannel,
    gather_manifests,
)
from megatron_bridge.weight_sync.transport import ProcessGroupTransport
from pipeline.background import in_background
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import DeadlineExceededError, DiskFullError

STAGE_SIZE = 4


class LikeRanks:
    """In the place of RankSync: the ranks of one stage, all of which say what this one does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gather(self, action: Callable[[], Any]) -> list[Any]:
        return [action()] * STAGE_SIZE

    def tell(self, action: Callable[[], Any]) -> Any:
        return action() if self.rank == 0 else None


class NoEngines:
    """In the place of a FleetUpdateSession: nothing is delivered."""

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


def test_the_last_stage_completes_the_folder(tmp_path: Path) -> None:
    temporary = tmp_path / "000001.tmp-1"
    manifests: list[dict[str, object]] = []
    complete = lambda: manifests.append(gather_manifests(temporary, 2, 10))  # noqa: E731
    writers = [
        FolderWriter(temporary, 0, [("a", torch.ones(2))], complete),
        FolderWriter(temporary, 1, [("b", torch.zeros(3))]),
    ]
    assert [writer.wait(10) >= 0 for writer in writers] == [True, True]
    (manifest,) = manifests
    files = {name: entry["file"] for name, entry in manifest.items()}  # type: ignore[index]
    assert files == {"a": "model-stage00-00001.safetensors", "b": "model-stage01-00001.safetensors"}
    assert load_file(temporary / files["b"])["b"].shape == (3,)
    assert sorted(path.name for path in temporary.iterdir()) == sorted(files.values()), "stage files are gone"


def test_a_stage_that_never_ends_is_named(tmp_path: Path) -> None:
    (tmp_path / "stage-00.json").write_text(json.dumps({}))
    with pytest.raises(DeadlineExceededError, match=r"stage-01\.json did not appear within 0\.1 s"):
        gather_manifests(tmp_path, 2, 0.1)


def test_what_stops_a_writer_is_raised_where_it_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        FolderWriter(tmp_path / "file" / "folder", 0, []).wait(10)


def test_a_folder_that_a_full_disk_cut_short_is_removed(tmp_path: Path) -> None:
    """As large as a policy, it would be in the way of whatever is to be written once there is room."""
    temporary = tmp_path / ".000013.host-0123456789ab.tmp"

    def fills() -> None:
        assert any(temporary.iterdir())
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        FolderWriter(temporary, 0, [("a", torch.ones(2))], fills).wait(10)
    assert not temporary.exists()


def test_a_slow_disk_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    go_on = threading.Event()
    writer = FolderWriter(tmp_path / "t", 0, [], lambda: go_on.wait(10) and None)
    with pytest.raises(DeadlineExceededError, match=r"was not written within 0\.1 s"):
        writer.wait(0.1)
    go_on.set()
    writer.wait(10)


def taken(snapshot: HostSnapshot, **tensors: Tensor) -> dict[str, list[float]]:
    snapshot.begin()
    for name, tensor in tensors.items():
        snapshot.add(name, tensor)
    snapshot.end()
    return {name: tensor.tolist() for name, tensor in snapshot}


def test_a_change_of_the_weights_does_not_reach_it() -> None:
    snapshot, weight = HostSnapshot(pinned=False), torch.ones(2)
    assert taken(snapshot, a=weight) == {"a": [1, 1]}
    weight.zero_()
    assert {name: tensor.tolist() for name, tensor in snapshot} == {"a": [1, 1]}


def test_memory_is_used_again_where_it_fits() -> None:
    snapshot = HostSnapshot(pinned=False)
    assert taken(snapshot, a=torch.ones(2), b=torch.ones(3)) == {"a": [1, 1], "b": [1, 1, 1]}
    first = dict(snapshot)
    assert taken(snapshot, b=torch.zeros(1), a=torch.zeros(2)) == {"b": [0], "a": [0, 0]}
    assert dict(snapshot)["a"].data_ptr() == first["a"].data_ptr()
    assert first["b"].tolist() == [1, 1, 1]


def test_readers_follow_it_as_it_grows() -> None:
    snapshot, seen = HostSnapshot(pinned=False), threading.Event()
    snapshot.begin()

    def read() -> list[str]:
        names = []
        for name, _ in snapshot:
            names.append(name)
            seen.set()
        return names

    readers = [in_background(read, "reader") for _ in range(2)]
    snapshot.add("a", torch.ones(1))
    assert seen.wait(10), "before the snapshot is complete"
    snapshot.add("b", torch.ones(1))
    snapshot.end()
    assert [reader.result() for reader in readers] == [["a", "b"]] * 2


def test_what_ended_it_is_raised_by_every_reader() -> None:
    snapshot = HostSnapshot(pinned=False)
    snapshot.begin()
    snapshot.add("a", torch.ones(1))
    waiting = in_background(lambda: list(snapshot), "reader")
    snapshot.end(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        waiting.result()
    assert taken(snapshot, b=torch.ones(1)) == {"b": [1]}
