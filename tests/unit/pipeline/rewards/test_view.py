"""What the sandbox shows of a user's folder."""

from __future__ import annotations

from pathlib import Path

from pipeline.rewards.sandbox.view import View


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
