"""What the sandbox shows of a user's folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pipeline.rewards.sandbox.view import View, view_of


def test_installed_packages_are_the_system_s_also_behind_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are hundreds, which bubblewrap would mount one by one."""
    real, users = tmp_path / "real/lib/python3/site-packages", tmp_path / ".local/lib/python3/site-packages"
    for folder in (real, users, tmp_path / "project/src"):
        folder.mkdir(parents=True)
    (tmp_path / "project/.venv").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "project")
    for path in (users, tmp_path / "project/.venv/lib/python3/site-packages", tmp_path / "project/src"):
        monkeypatch.syspath_prepend(str(path))
    view = view_of("json:loads", [], own=True)
    assert {real, users} <= set(view.system)
    assert {tmp_path / "project", tmp_path / "project/src"} <= set(view.own)
    assert not [path for path in view.own if path.name == "site-packages"]


def test_a_python_in_the_home_folder_shows_nothing_else_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `python -m venv ~`, or where a link in the home folder leads to the interpreter."""
    home = tmp_path / "home"
    for folder in (".ssh", "bin", "lib/python3/site-packages", "project", "venv/bin"):
        (home / folder).mkdir(parents=True)
    (home / "pyvenv.cfg").touch()
    (home / "python").symlink_to(os.path.realpath(sys.executable))
    (home / "venv/bin/python").symlink_to(home / "python")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "project")
    for prefix in (home, tmp_path):
        for name in ("prefix", "exec_prefix"):
            monkeypatch.setattr(sys, name, str(prefix))
        monkeypatch.setattr(sys, "executable", str(home / "venv/bin/python"))
        view = view_of("json:loads", [], own=True)
        assert not view.shows(home / ".ssh")
        assert not [path for path, whole in view.pieces() if whole and home.is_relative_to(path)]
        assert home / "python" in view.system
        assert home / "project" in view.own
        if prefix == home:
            assert {home / "bin", home / "lib", home / "pyvenv.cfg"} <= set(view.system)


def test_no_link_shows_what_begins_with_a_dot(tmp_path: Path) -> None:
    own = tmp_path / "home"
    for folder in (own / ".ssh", own / ".config/judge", own / "project", tmp_path / "data"):
        folder.mkdir(parents=True)
    (own / "project/.env").write_text("deeper down it can be read")
    links = {"keys": ".ssh", "judge": ".config/judge", "here": ".", "up": "..", "rows": "../data", "same": "project"}
    for name, target in links.items():
        (own / name).symlink_to(target)
    pieces = View(system=(), own=(own,)).pieces()
    assert pieces[0] == (own, False)
    assert set(pieces[1:]) == {(own / "project", True), (tmp_path / "data", True)}


def test_the_folder_of_runs_is_hidden_unless_what_is_shown_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("home/project/src", "home/runs/demo", "home/project/demo"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.syspath_prepend(str(tmp_path / "home/project/src"))

    def hidden(run: Path) -> tuple[Path, ...]:
        return view_of("json:loads", [run], own=True, runs=run.parent).hidden

    demo = tmp_path / "home/runs/demo"
    assert hidden(demo) == (demo, demo.parent)
    (tmp_path / "link").symlink_to(demo.parent)
    assert hidden(tmp_path / "link/demo") == (demo, demo.parent)
    for alone in (tmp_path / "home/demo", tmp_path / "demo", tmp_path / "home/project/demo"):
        assert hidden(alone) == (alone,)
