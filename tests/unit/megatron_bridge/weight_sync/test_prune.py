"""Policies that nothing needs any more lose their name before they are deleted."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from megatron_bridge.weight_sync.export import prune
from pipeline.data.files import remove_leftovers
from pipeline.data.run_directory import numbered_folders, unfenced
from tests.support.delta_policies import drawn, moved, write_version


def test_a_kill_while_it_deletes_leaves_no_half_of_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in range(4):
        (tmp_path / f"{version:06d}").mkdir()
        (tmp_path / f"{version:06d}" / "weights").touch()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, published=3, keep=1)
    assert numbered_folders(tmp_path) == [0, 2, 3]
    prune(tmp_path, published=3, keep=1)
    assert numbered_folders(tmp_path) == [2, 3]


def test_what_cannot_be_deleted_is_left_to_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, a file that a reader has open leaves its folder not empty. The version is published by then."""

    def not_empty(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    for version in range(2):
        (tmp_path / f"{version:06d}").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", not_empty)
        prune(tmp_path, published=1, keep=0)
    assert numbered_folders(tmp_path) == [1]
    assert len(remove_leftovers(tmp_path, unfenced)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]


def test_what_a_kept_version_is_made_from_is_kept(tmp_path: Path) -> None:
    """1 whole, deltas 2 and 3, 4 whole with a delta, deltas 5 and 6."""
    tensors = drawn(0, count=10)
    write_version(tmp_path, 1, tensors)
    for version in range(2, 7):
        before, tensors = tensors, moved(tensors, version)
        write_version(tmp_path, version, tensors, base=(version - 1, before), whole=version == 4)
    prune(tmp_path, published=6, keep=3)
    assert numbered_folders(tmp_path) == [1, 2, 3, 4, 5, 6]
    prune(tmp_path, published=6, keep=1)
    assert numbered_folders(tmp_path) == [4, 5, 6]
