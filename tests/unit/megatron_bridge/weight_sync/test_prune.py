"""Policies that nothing needs any more lose their name before they are deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_bridge.weight_sync.export import prune
from pipeline.data.run_directory import numbered_folders


def test_a_kill_while_it_deletes_leaves_no_half_of_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in range(4):
        (tmp_path / f"{version:06d}").mkdir()
        (tmp_path / f"{version:06d}" / "weights").touch()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda _folder: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, published=3, keep=1)
    assert numbered_folders(tmp_path) == [1, 2, 3]
    assert prune(tmp_path, published=3, keep=1) == [1]
    assert numbered_folders(tmp_path) == [2, 3]
