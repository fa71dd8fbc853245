"""Stages that write one folder together, without talking to one another."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_bridge.weight_sync.background_writer import FolderWriter, gather_manifests, stage_file
from pipeline.errors import DeadlineExceededError


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
    stage_file(tmp_path, 0).write_text(json.dumps({}))
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
