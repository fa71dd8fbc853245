"""What bubblewrap mounts, and what a process under it sees: all of the view, and nothing that comes beside it later."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pipeline.rewards.sandbox.view import MOST_MOUNTS, Bubblewrap, View, view_of
from pipeline.rewards.worker_process import WorkerProcess
from tests.support.sandboxes import sandbox_of

SYSTEM = view_of("json:loads", [], own=False).system
HONEST = "verifier_examples:behave"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a run, a key, a Python and links."""
    home = tmp_path / "home"
    for folder in (".ssh", "project/src", "runs/demo", "runs/other", ".venv/bin"):
        (home / folder).mkdir(parents=True)
    for file in (
        ".ssh/id",
        ".env",
        "key",
        "table.json",
        "project/src/reward.py",
        "runs/demo/recipe.yaml",
        "runs/other/a",
    ):
        (home / file).write_text(file)
    (home / ".venv/bin/python").write_text("python")
    for link, target in {"keys": ".ssh", "rows": "table.json", "here": ".", "venv": ".venv"}.items():
        (home / link).symlink_to(target)
    return home


def seen(view: View, *paths: Path, shown: Bubblewrap | None = None) -> list[str]:
    """What a process reads of the files, `` of those that it cannot; of folders the names."""
    sandbox_of("bubblewrap")
    script = 'for one; do if [ -d "$one" ]; then ls -A "$one" | tr "\\n" " "; else cat "$one"; fi; echo; done'
    command = (shown or Bubblewrap(view)).command(["/bin/sh", "-c", script, "sh", *map(str, paths)])
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=100, check=False
    )
    return [line.strip() for line in done.stdout.split("\n")[:-1]]


def test_of_a_folder_what_is_shown_is_there_and_nothing_else(home: Path) -> None:
    view = View(system=SYSTEM, own=(home,), hidden=(home / "key", home / "runs/demo", home / "runs/later"))
    assert seen(view, home, home / "runs", home / "here") == [
        "here keys project rows runs table.json venv",
        "other",
        "here keys project rows runs table.json venv",
    ]
    files = [
        "table.json",
        "rows",
        "project/src/reward.py",
        "runs/other/a",
        "keys/id",
        "key",
        ".env",
        "runs/demo/recipe.yaml",
    ]
    assert seen(view, *(home / file for file in files)) == [
        *("table.json", "table.json", "project/src/reward.py", "runs/other/a"),
        *("", "", "", ""),
    ]


def test_what_python_needs_is_there_though_its_folder_begins_with_a_dot_or_is_a_link(home: Path) -> None:
    system = (*SYSTEM, home / ".venv/bin", home / "venv/bin")
    view = View(system=system, own=(home, home / "project/src"), hidden=(home / "runs",))
    found = seen(
        view, home / ".venv/bin/python", home / "venv/bin/python", home / "project/src/reward.py", home / ".env"
    )
    assert found == ["python", "python", "project/src/reward.py", ""]


def test_a_system_folder_that_holds_a_run_is_shown_without_it(home: Path) -> None:
    (home.parent / "link").symlink_to(home)
    view = View(system=(*SYSTEM, home.parent / "link"), hidden=(home / "runs/demo", home / "key"))
    paths = ("link/.env", "link/runs/other/a", "link/runs/demo/recipe.yaml", "link/key", "home/key")
    assert seen(view, *(home.parent / path for path in paths)) == [".env", "runs/other/a", "", "", ""]


def test_later_files_are_not_shown_and_cost_nothing(home: Path) -> None:
    """What is gone by then is not missed, and what has become a link leads nowhere."""
    sandbox_of("bubblewrap")
    (home / "judge").mkdir()
    shown = Bubblewrap(view := View(system=SYSTEM, own=(home,), hidden=(home / "runs",)))
    for number in range(MOST_MOUNTS + 100):
        (home / f"{number}.json").touch()
    (home / "table.json").unlink()
    (home / "judge").rmdir()
    (home / "judge").symlink_to(".ssh")
    files = (home / "project/src/reward.py", home / "judge/id", home / "1.json")
    assert seen(view, home, *files, shown=shown) == [
        "here judge key keys project rows venv",
        "project/src/reward.py",
        "",
        "",
    ]


def test_a_worker_starts_again_though_its_folder_is_full_by_then(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = sandbox_of("bubblewrap")
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    worker = WorkerProcess(HONEST, 10.0, 256, sandbox)
    try:
        assert worker.start() is None
        worker.kill()
        for number in range(MOST_MOUNTS + 100):
            (home / f"{number}.json").touch()
        assert worker.start() is None
    finally:
        worker.end()
        worker.release()


def test_more_than_can_be_mounted_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = sandbox_of("bubblewrap")
    for number in range(MOST_MOUNTS + 100):
        (home / f"{number}.json").touch()
    monkeypatch.chdir(home)
    problem = WorkerProcess(HONEST, 10.0, 256, sandbox).start()
    assert problem is not None
    assert f"{home} holds 160" in problem
    assert f"at most {MOST_MOUNTS} one by one; move them into a folder there" in problem
