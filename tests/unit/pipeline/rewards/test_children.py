"""Folders that were filled to be hard to empty."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.rewards.children import bytes_below, empty, remove


def test_trees_deeper_than_any_path_are_removed(tmp_path: Path) -> None:
    folder, here = tmp_path / "scratch", Path.cwd()
    folder.mkdir()
    try:
        os.chdir(folder)
        for _ in range(2500):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    assert bytes_below(folder, 10**9) > 10**9
    remove(folder)
    assert not folder.exists()


def test_files_links_and_folders_without_permissions_are_removed(tmp_path: Path) -> None:
    folder, outside = tmp_path / "scratch", tmp_path / "outside"
    (folder / "a" / "b").mkdir(parents=True)
    outside.mkdir()
    (outside / "kept").touch()
    (folder / "link").symlink_to(outside)
    (folder / "a" / "link").symlink_to(outside)
    (folder / "a" / "b" / "file").write_bytes(bytes(2**20))
    (folder / "kept").touch()
    assert 2**20 < bytes_below(folder) < 2**21
    (folder / "a" / "b").chmod(0)
    empty(folder, frozenset({"kept"}))
    assert [path.name for path in folder.iterdir()] == ["kept"]
    assert (outside / "kept").exists()
