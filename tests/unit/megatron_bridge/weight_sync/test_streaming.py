"""Which ranks keep a version in host memory, and how the folder behind the engines' back is written."""

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

from launch.verify.layouts import write_model
from megatron_bridge.weight_sync import snapshot, streaming
from megatron_bridge.weight_sync.disk import ProbeScorer, WeightCheckPlan
from megatron_bridge.weight_sync.streaming import (
    FolderWriter,
    StreamedChannel,
    gather_manifests,
)
from megatron_bridge.weight_sync.transport import ProcessGroupTransport
from pipeline.config.recipe import LearnerSection
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import DeadlineExceededError, DiskFullError
from precision.supervised import Supervised
from tests.support.learners import learner_here
from tests.support.ranks import run_ranks

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


HOSTS = [(["a", "a"], 2), (["a", "b"], 2), (["a", "b"], 1)]


def kept_by(model: Path, run: Path) -> list[bool]:
    """Whether this one of two tensor parallel ranks keeps a version, by the ranks' hosts and the number of engines."""
    plan = WeightCheckPlan(rows=((1, 2, 3, 4),), max_mean_gap_nats=1.0, new_checksums=None)
    section = LearnerSection(precision="fp32", tensor_parallel=2, step_deadline_s=60)
    kept = []
    StreamedChannel._deliver = lambda *_: {}  # type: ignore[method-assign]
    with learner_here(model, section, Supervised(), temperature=1.0, seed=0, total_steps=1) as made:
        for hosts, num_engines in HOSTS:
            snapshot.host_of_process = lambda hosts=hosts: hosts[made.rank]
            settings: dict[str, Any] = dict(num_engines=num_engines, keep=1, bucket_bytes=1 << 20, deadline_s=10.0)
            session: Any = NoEngines()
            run_directory, probe = RunDirectory(run), ProbeScorer(made)
            channel = StreamedChannel(
                made, session, run_directory, None, plan, probe, ProcessGroupTransport, **settings
            )
            for version in (1, 2):
                channel.publish(version)
            kept.append(bool(channel._snapshot._copies))
            channel.close()
    return kept


def test_one_rank_of_a_host_keeps_a_version_if_any_there_sends(tmp_path: Path) -> None:
    write_model(tmp_path / "model", experts=False)
    first, second = run_ranks(2, kept_by, tmp_path / "model", tmp_path / "run")
    assert first == [True, True, True]
    assert second == [False, True, False]


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
